resource "azurerm_storage_account" "this" {
  name                = var.account_name
  resource_group_name = var.resource_group_name
  location            = var.location
  tags                = var.tags

  account_tier             = "Standard"
  account_replication_type = var.replication

  min_tls_version                 = "TLS1_2"
  https_traffic_only_enabled      = true
  allow_nested_items_to_be_public = false
  shared_access_key_enabled       = false

  blob_properties {
    # No object is ever replaced, so versions would keep only what was deleted. Soft delete does the same for less.
    versioning_enabled = false

    dynamic "delete_retention_policy" {
      for_each = var.soft_delete_days == 0 ? [] : [var.soft_delete_days]

      content {
        days = delete_retention_policy.value
      }
    }
  }

  dynamic "network_rules" {
    for_each = length(var.allowed_subnet_ids) == 0 ? [] : [var.allowed_subnet_ids]

    content {
      default_action             = "Deny"
      bypass                     = ["AzureServices"]
      virtual_network_subnet_ids = network_rules.value
    }
  }

  # Azure deletes an account with all that is in it.
  lifecycle {
    prevent_destroy = true
  }
}

resource "azurerm_storage_container" "this" {
  name                  = var.container_name
  storage_account_id    = azurerm_storage_account.this.id
  container_access_type = "private"

  lifecycle {
    prevent_destroy = true
  }
}

resource "azurerm_monitor_diagnostic_setting" "access_logs" {
  count = var.access_logs_workspace_id == null ? 0 : 1

  name                       = "access-logs"
  target_resource_id         = "${azurerm_storage_account.this.id}/blobServices/default"
  log_analytics_workspace_id = var.access_logs_workspace_id

  dynamic "enabled_log" {
    for_each = ["StorageRead", "StorageWrite", "StorageDelete"]

    content {
      category = enabled_log.value
    }
  }
}
