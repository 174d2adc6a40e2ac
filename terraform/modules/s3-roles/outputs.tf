output "role_arns" {
  description = "The ARN of each role that was made: trainer, reader, janitor."
  value       = { for role, made in aws_iam_role.this : role => made.arn }
}

output "policies" {
  description = "Each role's policy as JSON, made or not, for whoever attaches them to roles of their own."
  value       = local.policies
}
