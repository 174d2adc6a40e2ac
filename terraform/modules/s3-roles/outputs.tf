output "role_arns" {
  description = "The ARN of each role that was made: trainer, reader, janitor."
  value       = { for role, made in aws_iam_role.this : role => made.arn }
}

output "role_names" {
  description = "The name of each role that was made, for an instance profile."
  value       = { for role, made in aws_iam_role.this : role => made.name }
}

output "policies" {
  description = "Each role's policy as JSON, also of roles that are not created. Attach it to a role of your own."
  value       = local.policies
}
