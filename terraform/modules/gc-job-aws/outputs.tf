output "log_group" {
  description = "The log group that has the output of each run."
  value       = aws_cloudwatch_log_group.this.name
}

output "cluster_arn" {
  description = "The ECS cluster that the runs appear in."
  value       = aws_ecs_cluster.this.arn
}
