output "container_id" {
  description = "The container's resource ID, for roles."
  value       = "${azurerm_storage_account.this.id}/blobServices/default/containers/${azurerm_storage_container.this.name}"
}

output "uri" {
  description = "The root of the container's checkpoints."
  value       = "az://${azurerm_storage_container.this.name}"
}

output "storage_options" {
  description = "Options(storage_options=...) for the URI: the account, and Microsoft Entra credentials."
  value       = { account_name = azurerm_storage_account.this.name, anon = false }
}
