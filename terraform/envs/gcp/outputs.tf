output "checkpoint_uri" {
  description = "The URI for cloudckpt: save to <uri>/step-100."
  value       = var.prefix == "" ? module.bucket.uri : "${module.bucket.uri}/${var.prefix}"
}

output "service_account_emails" {
  description = "The service accounts of the roles that have one."
  value       = module.roles.service_account_emails
}
