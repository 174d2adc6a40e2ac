resource "aws_ecs_cluster" "this" {
  name = var.name
  tags = var.tags
}

locals {
  # arn:<partition>:ecs:<region>:<account>:cluster/<name>
  partition = split(":", aws_ecs_cluster.this.arn)[1]
  region    = split(":", aws_ecs_cluster.this.arn)[3]
  account   = split(":", aws_ecs_cluster.this.arn)[4]
}

resource "aws_cloudwatch_log_group" "this" {
  name              = "/cloudckpt/${var.name}"
  retention_in_days = var.log_retention_days
  tags              = var.tags
}

resource "aws_security_group" "this" {
  name        = var.name
  description = "Out to S3, the registry and the logs; nothing in."
  vpc_id      = var.vpc_id
  tags        = var.tags
}

resource "aws_vpc_security_group_egress_rule" "https" {
  security_group_id = aws_security_group.this.id
  description       = "HTTPS"
  cidr_ipv4         = "0.0.0.0/0"
  from_port         = 443
  to_port           = 443
  ip_protocol       = "tcp"
}

resource "aws_ecs_task_definition" "this" {
  family                   = var.name
  requires_compatibilities = ["FARGATE"]
  network_mode             = "awsvpc"
  cpu                      = 512
  memory                   = 2048
  task_role_arn            = var.role_arn
  execution_role_arn       = aws_iam_role.execution.arn
  tags                     = var.tags

  runtime_platform {
    operating_system_family = "LINUX"
    cpu_architecture        = upper(var.architecture)
  }

  container_definitions = jsonencode([{
    name                   = "gc"
    image                  = var.image
    command                = local.command
    environment            = [{ name = "AWS_DEFAULT_REGION", value = local.region }]
    essential              = true
    readonlyRootFilesystem = true
    logConfiguration = {
      logDriver = "awslogs"
      options = {
        awslogs-group         = aws_cloudwatch_log_group.this.name
        awslogs-region        = local.region
        awslogs-stream-prefix = "gc"
      }
    }
  }])
}

resource "aws_scheduler_schedule" "this" {
  name                = var.name
  description         = "cloudckpt gc ${var.uri}"
  schedule_expression = var.schedule

  flexible_time_window {
    mode = "OFF"
  }

  target {
    arn      = aws_ecs_cluster.this.arn
    role_arn = aws_iam_role.scheduler.arn

    ecs_parameters {
      task_definition_arn = aws_ecs_task_definition.this.arn
      launch_type         = "FARGATE"

      network_configuration {
        subnets          = var.subnet_ids
        security_groups  = [aws_security_group.this.id]
        assign_public_ip = var.assign_public_ip
      }
    }

    retry_policy {
      maximum_retry_attempts = 3
    }
  }
}

# Pulls the image and writes the log. The container itself runs as var.role_arn.
resource "aws_iam_role" "execution" {
  name = "${var.name}-execution"
  tags = var.tags

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Principal = { Service = "ecs-tasks.amazonaws.com" }
      Action    = "sts:AssumeRole"
    }]
  })
}

resource "aws_iam_role_policy_attachment" "execution" {
  role       = aws_iam_role.execution.name
  policy_arn = "arn:${local.partition}:iam::aws:policy/service-role/AmazonECSTaskExecutionRolePolicy"
}

# Starts the task.
resource "aws_iam_role" "scheduler" {
  name = "${var.name}-scheduler"
  tags = var.tags

  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Principal = { Service = "scheduler.amazonaws.com" }
      Action    = "sts:AssumeRole"
      Condition = { StringEquals = { "aws:SourceAccount" = local.account } }
    }]
  })
}

resource "aws_iam_role_policy" "scheduler" {
  name = "run-gc"
  role = aws_iam_role.scheduler.id

  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid       = "Run"
        Effect    = "Allow"
        Action    = "ecs:RunTask"
        Resource  = "${aws_ecs_task_definition.this.arn_without_revision}:*"
        Condition = { ArnEquals = { "ecs:cluster" = aws_ecs_cluster.this.arn } }
      },
      {
        Sid       = "RunAs"
        Effect    = "Allow"
        Action    = "iam:PassRole"
        Resource  = [var.role_arn, aws_iam_role.execution.arn]
        Condition = { StringEquals = { "iam:PassedToService" = "ecs-tasks.amazonaws.com" } }
      },
    ]
  })
}
