# No resource and no data source here: `terraform console` evaluates it without the provider, and so the tests do.
# Why each action: docs/permissions.md.
locals {
  containers = "Microsoft.Storage/storageAccounts/blobServices/containers"

  data_actions = {
    trainer = concat(
      ["${local.containers}/blobs/read", "${local.containers}/blobs/write"],
      var.trainer_may_delete ? ["${local.containers}/blobs/delete"] : [],
    )
    reader  = ["${local.containers}/blobs/read"]
    janitor = ["${local.containers}/blobs/read", "${local.containers}/blobs/write", "${local.containers}/blobs/delete"]
  }

  # Data ends in .safetensors, manifests and fences in .json: the janitor writes a fence where a manifest would be.
  # https://learn.microsoft.com/azure/storage/blobs/storage-auth-abac-attributes
  conditions = {
    trainer = null
    reader  = null
    janitor = "((!(ActionMatches{'${local.containers}/blobs/write'})) OR (@Resource[${local.containers}/blobs:path] StringLike '*.json'))"
  }

  roles = toset([
    for role in ["trainer", "reader", "janitor"] : role
    if length(var.principal_ids[role]) + length(var.service_accounts[role]) > 0
  ])
  has_identity = toset([for role in local.roles : role if length(var.service_accounts[role]) > 0])

  grants = {
    for grant in flatten([
      for role in local.roles : [for id in var.principal_ids[role] : { role = role, principal_id = id }]
    ]) : "${grant.role}/${grant.principal_id}" => grant
  }

  federations = {
    for pair in flatten([
      for role in local.has_identity : [for account in var.service_accounts[role] : { role = role, account = account }]
    ]) : "${pair.role}/${pair.account}" => pair
  }

  # A custom role belongs to a subscription or a resource group, never to a container.
  resource_group_id = regex("^/subscriptions/[^/]+/resourceGroups/[^/]+", var.container_id)
  container         = join("/", [split("/", var.container_id)[8], split("/", var.container_id)[12]])
}
