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
