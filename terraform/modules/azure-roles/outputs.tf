output "client_ids" {
  description = "The client ID of each role's own identity, for the annotation azure.workload.identity/client-id."
  value       = { for role, identity in azurerm_user_assigned_identity.this : role => identity.client_id }
}

output "role_definition_ids" {
  description = "The ID of each custom role that was made."
  value       = { for role, made in azurerm_role_definition.this : role => made.role_definition_resource_id }
}
