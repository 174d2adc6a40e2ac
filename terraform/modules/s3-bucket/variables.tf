variable "name" {
  description = "The bucket's name."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", var.name)) && !strcontains(var.name, "..")
    error_message = "A bucket's name has 3 to 63 lower-case letters, digits, dots and hyphens, with a letter or digit at both ends and no two dots in a row."
  }
}

variable "partition" {
  description = "The partition of AWS in the bucket's ARN."
  type        = string
  default     = "aws"
  nullable    = false

  validation {
    condition     = contains(["aws", "aws-cn", "aws-us-gov"], var.partition)
    error_message = "One of aws, aws-cn and aws-us-gov."
  }
}

variable "create_kms_key" {
  description = "Creates a KMS key for the bucket, which AWS rotates each year. Its policy leaves access to IAM."
  type        = bool
  default     = false
  nullable    = false
}

variable "kms_key_arn" {
  description = "The KMS key that objects are encrypted with. Without one, and without create_kms_key, S3 encrypts them with its own (SSE-S3)."
  type        = string
  default     = null

  validation {
    condition     = var.kms_key_arn == null || can(regex("^arn:aws[a-z-]*:kms:[a-z0-9-]+:[0-9]{12}:key/.+$", var.kms_key_arn))
    error_message = "Pass the ARN of the key itself (arn:aws:kms:<region>:<account>:key/<id>), not of an alias."
  }
}

variable "versioning" {
  description = "S3 keeps deleted and replaced objects for keep_noncurrent_days, and bills them. A mistaken delete can be undone in that time."
  type        = bool
  default     = false
  nullable    = false
}

variable "keep_noncurrent_days" {
  description = "With versioning, deleted and replaced objects are removed for good after this number of days."
  type        = number
  default     = 7
  nullable    = false

  validation {
    condition     = var.keep_noncurrent_days >= 1 && floor(var.keep_noncurrent_days) == var.keep_noncurrent_days
    error_message = "A whole number of days, at least 1."
  }
}

variable "abort_uploads_after_days" {
  description = "Unfinished multipart uploads of this age are aborted. Longer than the longest save may take."
  type        = number
  default     = 7
  nullable    = false

  validation {
    condition     = var.abort_uploads_after_days >= 1 && floor(var.abort_uploads_after_days) == var.abort_uploads_after_days
    error_message = "A whole number of days, at least 1."
  }
}

variable "require_conditional_commits" {
  description = "S3 denies every put of a manifest without If-None-Match, so no program replaces one. It then also denies saves with commit=\"unconditional\", and tools that copy checkpoints object by object."
  type        = bool
  default     = false
  nullable    = false
}

variable "access_logs_bucket" {
  description = "The bucket that S3 writes a line for each request to, below <name>/. Its policy has to let logging.s3.amazonaws.com put objects. Null: no access logs."
  type        = string
  default     = null

  validation {
    condition     = var.access_logs_bucket == null || can(regex("^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", var.access_logs_bucket))
    error_message = "The name of a bucket, without s3://."
  }
}

variable "force_destroy" {
  description = "Lets terraform destroy remove a bucket that still holds checkpoints."
  type        = bool
  default     = false
  nullable    = false
}

variable "tags" {
  description = "Tags of the bucket, and of its key."
  type        = map(string)
  default     = {}
  nullable    = false
}
