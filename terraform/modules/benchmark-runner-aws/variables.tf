variable "bucket_uri" {
  description = "The folder that the benchmark writes to. It removes all that it wrote."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9_.=-]+)+$", var.bucket_uri))
    error_message = "s3://<bucket>/<folder>, of letters, digits and _.=-: it becomes part of a command."
  }
}

variable "role_name" {
  description = "The IAM role that the instance runs as: the s3-roles module's trainer, with ec2.amazonaws.com among its trusted_services."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[A-Za-z0-9+=,.@_-]{1,64}$", var.role_name))
    error_message = "The role's name, not its ARN."
  }
}

variable "vpc_id" {
  description = "The VPC that the instance runs in."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^vpc-[0-9a-f]+$", var.vpc_id))
    error_message = "vpc-<id>."
  }
}

variable "subnet_id" {
  description = "A subnet from which S3, the package index and source_url can be reached: through a NAT gateway, or endpoints of its own. The instance gets no public address."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^subnet-[0-9a-f]+$", var.subnet_id))
    error_message = "subnet-<id>."
  }
}

variable "instance_type" {
  description = "The type of the machine. Use the type of the machines that train, or one with a similar network."
  type        = string
  default     = "c7gn.4xlarge"
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9-]+\\.[a-z0-9-]+$", var.instance_type))
    error_message = "An instance type, such as c7gn.4xlarge."
  }
}

variable "architecture" {
  description = "The architecture of instance_type: arm64 or x86_64."
  type        = string
  default     = "arm64"
  nullable    = false

  validation {
    condition     = contains(["arm64", "x86_64"], var.architecture)
    error_message = "arm64 or x86_64."
  }
}

variable "source_url" {
  description = "The URL of an archive (tar.gz) of the repository, at the commit to measure."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^https://[A-Za-z0-9._~:/?#@%+=&-]+$", var.source_url))
    error_message = "An https URL. It becomes part of a command."
  }
}

variable "name" {
  description = "The name of the instance, and of all that belongs to it."
  type        = string
  default     = "cloudckpt-bench"
  nullable    = false

  validation {
    condition     = can(regex("^[A-Za-z0-9_-]{1,64}$", var.name))
    error_message = "1 to 64 letters, digits, hyphens and underscores."
  }
}

variable "tags" {
  description = "Tags of all that is made."
  type        = map(string)
  default     = {}
  nullable    = false
}
