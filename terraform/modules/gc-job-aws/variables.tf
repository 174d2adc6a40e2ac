variable "uri" {
  description = "The folder that gc cleans up, with all below it."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9!_.()=+@-]+)*$", var.uri))
    error_message = "s3://<bucket> or s3://<bucket>/<folder>, without a slash at the end."
  }
}

variable "image" {
  description = "A container image whose entry point is cloudckpt. The overview has a Dockerfile."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9][A-Za-z0-9./:@_-]+$", var.image))
    error_message = "An image's name, such as 123456789012.dkr.ecr.eu-west-1.amazonaws.com/cloudckpt:1."
  }
}

variable "role_arn" {
  description = "The role that gc runs as: the s3-roles module's janitor, with ecs-tasks.amazonaws.com among its trusted_services."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^arn:aws[a-z-]*:iam::[0-9]{12}:role/.+$", var.role_arn))
    error_message = "Pass the ARN of the role (arn:aws:iam::<account>:role/<name>)."
  }
}

variable "vpc_id" {
  description = "The VPC that gc runs in."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^vpc-[0-9a-f]+$", var.vpc_id))
    error_message = "vpc-<id>."
  }
}

variable "subnet_ids" {
  description = "Subnets from which S3, the image's registry and CloudWatch Logs can be reached: through a NAT gateway, endpoints of their own, or assign_public_ip."
  type        = list(string)
  nullable    = false

  validation {
    condition     = length(var.subnet_ids) > 0 && alltrue([for id in var.subnet_ids : can(regex("^subnet-[0-9a-f]+$", id))])
    error_message = "One or more of subnet-<id>."
  }
}

variable "assign_public_ip" {
  description = "Gives gc a public address, which a subnet without a NAT gateway needs. Nothing can connect to it."
  type        = bool
  default     = false
  nullable    = false
}

variable "schedule" {
  description = "The time of each run, in UTC, as EventBridge Scheduler takes it."
  type        = string
  default     = "cron(0 3 * * ? *)"
  nullable    = false

  validation {
    condition     = can(regex("^(cron|rate)\\(.+\\)$", var.schedule))
    error_message = "cron(<minute> <hour> <day> <month> <weekday> <year>) or rate(<number> <unit>)."
  }
}

variable "older_than" {
  description = "gc keeps the data of a save that wrote something in this time. Longer than the longest save may take."
  type        = string
  default     = "24h"
  nullable    = false

  validation {
    condition     = can(regex("^[1-9][0-9]*[hd]$", var.older_than))
    error_message = "A number of hours or days, such as 24h or 2d."
  }
}

variable "architecture" {
  description = "The architecture of the image: arm64 or x86_64."
  type        = string
  default     = "x86_64"
  nullable    = false

  validation {
    condition     = contains(["arm64", "x86_64"], var.architecture)
    error_message = "arm64 or x86_64."
  }
}

variable "log_retention_days" {
  description = "CloudWatch keeps the output of each run for this number of days."
  type        = number
  default     = 30
  nullable    = false

  validation {
    condition     = contains([1, 3, 5, 7, 14, 30, 60, 90, 120, 150, 180, 365, 400, 545, 731, 1096, 1827, 2192, 2557, 2922, 3288, 3653], var.log_retention_days)
    error_message = "A number of days that CloudWatch Logs allows, such as 7, 30, 90 or 365."
  }
}

variable "name" {
  description = "The name of the schedule, and of all that belongs to it."
  type        = string
  default     = "cloudckpt-gc"
  nullable    = false

  validation {
    condition     = can(regex("^[A-Za-z0-9_-]{1,54}$", var.name))
    error_message = "1 to 54 letters, digits, hyphens and underscores."
  }
}

variable "tags" {
  description = "Tags of all that is made."
  type        = map(string)
  default     = {}
  nullable    = false
}
