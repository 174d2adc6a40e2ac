# As policies.tf: nothing of the provider's.
locals {
  oidc_issuer = var.oidc_provider_arn == null ? "" : split("oidc-provider/", var.oidc_provider_arn)[1]

  trust_statements = {
    for role in ["trainer", "reader", "janitor"] : role => concat(
      [
        for principals in [sort(var.trusted_principals[role])] : {
          Sid       = "Assume"
          Effect    = "Allow"
          Principal = { AWS = principals }
          Action    = "sts:AssumeRole"
        } if length(principals) > 0
      ],
      [
        for services in [sort(var.trusted_services[role])] : {
          Sid       = "Machines"
          Effect    = "Allow"
          Principal = { Service = services }
          Action    = "sts:AssumeRole"
        } if length(services) > 0
      ],
      [
        for accounts in [sort(var.service_accounts[role])] : {
          Sid       = "ServiceAccounts"
          Effect    = "Allow"
          Principal = { Federated = var.oidc_provider_arn }
          Action    = "sts:AssumeRoleWithWebIdentity"
          Condition = {
            StringEquals = {
              "${local.oidc_issuer}:aud" = "sts.amazonaws.com"
              "${local.oidc_issuer}:sub" = [for account in accounts : "system:serviceaccount:${account}"]
            }
          }
        } if length(accounts) > 0
      ],
    )
  }

  trust = {
    for role, statements in local.trust_statements : role => jsonencode({
      Version   = "2012-10-17"
      Statement = statements
    }) if length(statements) > 0
  }
}
