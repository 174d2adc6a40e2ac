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
      condition     = var.eks_cluster_name != null || var.oidc_provider_arn != null || length(flatten(values(var.service_accounts))) == 0
      error_message = "service_accounts need eks_cluster_name or oidc_provider_arn."
    }
  }
}

resource "aws_iam_role_policy" "this" {
  for_each = local.trust

  name   = "checkpoints"
  role   = aws_iam_role.this[each.key].id
  policy = local.policies[each.key]
}

resource "aws_eks_pod_identity_association" "this" {
  for_each = local.pods

  cluster_name    = var.eks_cluster_name
  namespace       = split(":", each.value.account)[0]
  service_account = split(":", each.value.account)[1]
  role_arn        = aws_iam_role.this[each.value.role].arn
  tags            = var.tags
}
