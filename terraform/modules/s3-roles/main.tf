resource "aws_iam_role" "this" {
  for_each = local.trust

  name                 = "${var.name_prefix}-${each.key}"
  description          = "cloudckpt's ${each.key} for ${local.objects}"
  assume_role_policy   = each.value
  max_session_duration = var.max_session_hours * 3600
  permissions_boundary = var.permissions_boundary_arn
  tags                 = var.tags

  lifecycle {
    precondition {
      condition     = var.oidc_provider_arn != null || length(flatten(values(var.service_accounts))) == 0
      error_message = "service_accounts need oidc_provider_arn."
    }
  }
}

resource "aws_iam_role_policy" "this" {
  for_each = local.trust

  name   = "checkpoints"
  role   = aws_iam_role.this[each.key].id
  policy = local.policies[each.key]
}
