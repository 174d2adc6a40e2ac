resource "azurerm_role_definition" "this" {
  for_each = local.roles

  name        = "${var.name_prefix}-${each.key} of ${local.container}"
  description = "What cloudckpt's ${each.key} needs, and no more."
  scope       = local.resource_group_id

  permissions {
    actions      = ["${local.containers}/read"]
    data_actions = local.data_actions[each.key]
  }
}

resource "azurerm_user_assigned_identity" "this" {
  for_each = local.has_identity

  name                = "${var.name_prefix}-${each.key}"
  resource_group_name = var.resource_group_name
  location            = var.location
  tags                = var.tags

  lifecycle {
    precondition {
      condition     = var.oidc_issuer_url != null
      error_message = "service_accounts need oidc_issuer_url."
    }
  }
}

resource "azurerm_federated_identity_credential" "this" {
  for_each = local.federations

  name                = substr(replace(each.key, "/[/:.]/", "-"), 0, 120)
  resource_group_name = var.resource_group_name
  parent_id           = azurerm_user_assigned_identity.this[each.value.role].id
  issuer              = var.oidc_issuer_url
  subject             = "system:serviceaccount:${each.value.account}"
  audience            = ["api://AzureADTokenExchange"]
}

resource "azurerm_role_assignment" "identities" {
  for_each = local.has_identity

  scope              = var.container_id
  role_definition_id = azurerm_role_definition.this[each.key].role_definition_resource_id
  principal_id       = azurerm_user_assigned_identity.this[each.key].principal_id
  principal_type     = "ServicePrincipal"
  condition          = local.conditions[each.key]
  condition_version  = local.conditions[each.key] == null ? null : "2.0"
}

resource "azurerm_role_assignment" "principals" {
  for_each = local.grants

  scope              = var.container_id
  role_definition_id = azurerm_role_definition.this[each.value.role].role_definition_resource_id
  principal_id       = each.value.principal_id
  condition          = local.conditions[each.value.role]
  condition_version  = local.conditions[each.value.role] == null ? null : "2.0"
}
