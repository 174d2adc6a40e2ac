# No resource and no data source here: `terraform console` evaluates it without the provider, and so the tests do.
# Why each permission: docs/permissions.md.
locals {
  permissions = {
    trainer = concat(
      ["storage.objects.create", "storage.objects.get", "storage.objects.list"],
      var.trainer_may_delete ? ["storage.objects.delete"] : [],
    )
    reader  = ["storage.objects.get", "storage.objects.list"]
    janitor = ["storage.objects.delete", "storage.objects.get", "storage.objects.list"]
    # The janitor's second role: a fence is put where a manifest would be.
    fence = ["storage.objects.create"]
  }

  objects = "projects/_/buckets/${var.bucket}/objects/${var.prefix == "" ? "" : "${var.prefix}/"}"

  # https://cloud.google.com/iam/docs/conditions-attribute-reference
  in_prefix = join(" || ", concat(
    ["resource.name.startsWith('${local.objects}')"],
    ["api.getAttribute('storage.googleapis.com/objectListPrefix', '').startsWith('${var.prefix}/')"],
  ))

  conditions = {
    trainer = var.prefix == "" ? "" : local.in_prefix
    reader  = var.prefix == "" ? "" : local.in_prefix
    janitor = var.prefix == "" ? "" : local.in_prefix
    # Data ends in .safetensors, manifests and fences in .json.
    fence = "resource.name.startsWith('${local.objects}') && resource.name.endsWith('.json')"
  }

  has_account = {
    for role, accounts in var.service_accounts : role => accounts if length(accounts) > 0 || contains(var.own_accounts, role)
  }
  roles     = toset([for role in ["trainer", "reader", "janitor"] : role if length(var.members[role]) > 0 || contains(keys(local.has_account), role)])
  all_roles = setunion(local.roles, contains(local.roles, "janitor") ? ["fence"] : [])

  workload_identity_pool = "${coalesce(var.workload_identity_project, var.project)}.svc.id.goog"
  impersonations = {
    for pair in flatten([
      for role, accounts in local.has_account : [
        for account in accounts : { role = role, account = account }
      ]
      ]) : "${pair.role}/${pair.account}" => {
      role   = pair.role
      member = "serviceAccount:${local.workload_identity_pool}[${replace(pair.account, ":", "/")}]"
    }
  }

  grants = {
    for grant in flatten([
      for role in local.all_roles : [
        for member in var.members[role == "fence" ? "janitor" : role] : { role = role, member = member }
      ]
    ]) : "${grant.role}/${grant.member}" => grant
  }
}
