output "checkpoint_uri" {
  description = "What to pass to cloudckpt: save to <it>/step-100."
  value       = var.prefix == "" ? module.bucket.uri : "${module.bucket.uri}/${var.prefix}"
}

output "role_arns" {
  description = "The roles: trainer, reader, janitor."
  value       = module.roles.role_arns
}
