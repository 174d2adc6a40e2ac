resource "google_project_iam_custom_role" "this" {
  for_each = local.all_roles

  project     = var.project
  role_id     = "${var.name_prefix}_${each.key}"
  title       = "${var.name_prefix} ${each.key}"
  description = "What cloudckpt's ${each.key} needs, and no more."
  permissions = local.permissions[each.key]
}

resource "google_service_account" "this" {
  for_each = local.has_account

  project      = var.project
  account_id   = "${var.name_prefix}-${each.key}"
  display_name = "cloudckpt's ${each.key} for gs://${var.bucket}/${var.prefix}"
}

resource "google_service_account_iam_member" "workload_identity" {
  for_each = local.impersonations

  service_account_id = google_service_account.this[each.value.role].name
  role               = "roles/iam.workloadIdentityUser"
  member             = each.value.member
}

resource "google_storage_bucket_iam_member" "accounts" {
  for_each = { for role in local.all_roles : role => role == "fence" ? "janitor" : role if contains(keys(local.has_account), role == "fence" ? "janitor" : role) }

  bucket = var.bucket
  role   = google_project_iam_custom_role.this[each.key].id
  member = google_service_account.this[each.value].member

  dynamic "condition" {
    for_each = local.conditions[each.key] == "" ? [] : [local.conditions[each.key]]

    content {
      title      = "${var.name_prefix}_${each.key}"
      expression = condition.value
    }
  }
}

resource "google_storage_bucket_iam_member" "members" {
  for_each = local.grants

  bucket = var.bucket
  role   = google_project_iam_custom_role.this[each.value.role].id
  member = each.value.member

  dynamic "condition" {
    for_each = local.conditions[each.value.role] == "" ? [] : [local.conditions[each.value.role]]

    content {
      title      = "${var.name_prefix}_${each.value.role}"
      expression = condition.value
    }
  }
}
