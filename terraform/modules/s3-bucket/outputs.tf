output "name" {
  description = "The bucket's name, for the s3:// URI."
  value       = aws_s3_bucket.this.id
}

output "arn" {
  description = "The bucket's ARN, for policies."
  value       = aws_s3_bucket.this.arn
}

output "uri" {
  description = "The root of the bucket's checkpoints."
  value       = "s3://${aws_s3_bucket.this.id}"
}

output "kms_key_arn" {
  description = "The KMS key that objects are encrypted with; null where S3 encrypts them with its own."
  value       = local.kms_key_arn
}

output "vpc_endpoint_policy" {
  description = "A policy as JSON for a VPC's endpoint for S3: through the endpoint this bucket can be reached, and no other."
  value       = local.vpc_endpoint_policy
}
