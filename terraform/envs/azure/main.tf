# One container, and the roles of one project's training jobs in it. Copy it, and change what is yours.
terraform {
  required_version = ">= 1.5"

  required_providers {
    azurerm = {
      source  = "hashicorp/azurerm"
      version = ">= 4.9, < 5.0"
    }
  }
}

provider "azurerm" {
  subscription_id     = var.subscription_id
  storage_use_azuread = true

  features {}
}

resource "azurerm_resource_group" "this" {
  name     = var.resource_group_name
  location = var.location
}

module "container" {
  source = "../../modules/azure-container"

  account_name        = var.account_name
  resource_group_name = azurerm_resource_group.this.name
  location            = var.location
}

module "roles" {
  source = "../../modules/azure-roles"

  container_id        = module.container.container_id
  resource_group_name = azurerm_resource_group.this.name
  location            = var.location
  principal_ids       = var.principal_ids
  oidc_issuer_url     = var.oidc_issuer_url
  service_accounts    = var.service_accounts
}
