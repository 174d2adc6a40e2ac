output "instance_id" {
  description = "The instance, whose console's log has the result: aws ec2 get-console-output --latest --instance-id <it>."
  value       = aws_instance.this.id
}
