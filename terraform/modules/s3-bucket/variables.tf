variable "name" {
  description = "The bucket's name."
  type        = string

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", var.name)) && !strcontains(var.name, "..")
    error_message = "A bucket's name has 3 to 63 lower-case letters, digits, dots and hyphens, with a letter or digit at both ends and no two dots in a row."
  }
}

variable "kms_key_arn" {
  description = "The KMS key that objects are encrypted with. Without one, S3 encrypts them with its own (SSE-S3)."
  type        = string
  default     = null

  validation {
    condition     = var.kms_key_arn == null || can(regex("^arn:aws[a-z-]*:kms:[a-z0-9-]+:[0-9]{12}:key/.+$", var.kms_key_arn))
    error_message = "Pass the ARN of the key itself (arn:aws:kms:<region>:<account>:key/<id>), not of an alias."
  }
}

variable "abort_uploads_after_days" {
  description = "Unfinished multipart uploads of this age are aborted. Longer than the longest save may take."
  type        = number
  default     = 7

  validation {
    condition     = var.abort_uploads_after_days >= 1 && floor(var.abort_uploads_after_days) == var.abort_uploads_after_days
    error_message = "A whole number of days, at least 1."
  }
}

variable "tags" {
  description = "Tags of the bucket."
  type        = map(string)
  default     = {}
}
