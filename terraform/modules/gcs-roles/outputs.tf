output "service_account_emails" {
  description = "The address of each role's own service account, for the annotation iam.gke.io/gcp-service-account."
  value       = { for role, account in google_service_account.this : role => account.email }
}

output "role_ids" {
  description = "The full name of each custom role that was made."
  value       = { for role, made in google_project_iam_custom_role.this : role => made.id }
}
