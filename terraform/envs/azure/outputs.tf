output "checkpoint_uri" {
  description = "The URI for cloudckpt: save to <uri>/step-100."
  value       = module.container.uri
}

output "storage_options" {
  description = "The value of Options(storage_options=...)."
  value       = module.container.storage_options
}

output "client_ids" {
  description = "The client IDs of the identities of the roles that have one."
  value       = module.roles.client_ids
}
