output "checkpoint_uri" {
  description = "The URI for cloudckpt: save to <uri>/step-100."
  value       = var.prefix == "" ? module.bucket.uri : "${module.bucket.uri}/${var.prefix}"
}

output "role_arns" {
  description = "The roles: trainer, reader, janitor."
  value       = module.roles.role_arns
}
