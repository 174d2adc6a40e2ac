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
        } if length(accounts) > 0 && var.oidc_provider_arn != null
      ],
      # https://docs.aws.amazon.com/eks/latest/userguide/pod-id-role.html
      [
        for account in sort(var.service_accounts[role]) : {
          Sid       = "Pods${index(sort(var.service_accounts[role]), account)}"
          Effect    = "Allow"
          Principal = { Service = "pods.eks.amazonaws.com" }
          Action    = ["sts:AssumeRole", "sts:TagSession"]
          Condition = {
            StringEquals = {
              "aws:RequestTag/eks-cluster-name"           = var.eks_cluster_name
              "aws:RequestTag/kubernetes-namespace"       = split(":", account)[0]
              "aws:RequestTag/kubernetes-service-account" = split(":", account)[1]
            }
          }
        } if var.eks_cluster_name != null
      ],
    )
  }

  trust = {
    for role, statements in local.trust_statements : role => jsonencode({
      Version   = "2012-10-17"
      Statement = statements
    }) if length(statements) > 0
  }

  pods = var.eks_cluster_name == null ? {} : {
    for pair in flatten([
      for role, accounts in var.service_accounts : [for account in accounts : { role = role, account = account }]
    ]) : "${pair.role}/${pair.account}" => pair
  }
}
