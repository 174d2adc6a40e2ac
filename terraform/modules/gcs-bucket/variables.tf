variable "name" {
  description = "The bucket's name."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]$", var.name)) && !startswith(var.name, "goog") && !strcontains(var.name, "google")
    error_message = "A bucket's name has 3 to 63 lower-case letters, digits, dots, hyphens and underscores, with a letter or digit at both ends, and nothing of Google's name."
  }
}

variable "project" {
  description = "The project that the bucket belongs to."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{4,28}[a-z0-9]$", var.project))
    error_message = "The project's ID, which has 6 to 30 lower-case letters, digits and hyphens."
  }
}

variable "location" {
  description = "The region of the bucket and of the machines that train, such as europe-west4."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[A-Za-z]+(-[A-Za-z]+[0-9]+)?[0-9]?$", var.location))
    error_message = "A region (europe-west4), a dual-region (NAM4) or a multi-region (EU)."
  }
}

variable "kms_key_name" {
  description = "The Cloud KMS key that objects are encrypted with. Without one, Google encrypts them with its own. The module lets the project's storage agent use it."
  type        = string
  default     = null

  validation {
    condition     = var.kms_key_name == null || can(regex("^projects/[^/]+/locations/[^/]+/keyRings/[^/]+/cryptoKeys/[^/]+$", var.kms_key_name))
    error_message = "The key's full name: projects/<project>/locations/<location>/keyRings/<ring>/cryptoKeys/<key>."
  }
}

variable "versioning" {
  description = "Google keeps deleted and replaced objects for keep_noncurrent_days, and bills them. It also keeps the parts of large objects, which take about as much space as the checkpoints."
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

variable "soft_delete_days" {
  description = "Google can restore deleted objects for this number of days, and bills them for as long, also the parts of large objects. 0 turns soft delete off."
  type        = number
  default     = 0
  nullable    = false

  validation {
    condition     = var.soft_delete_days == 0 || (var.soft_delete_days >= 7 && var.soft_delete_days <= 90 && floor(var.soft_delete_days) == var.soft_delete_days)
    error_message = "0, or a whole number of days from 7 to 90."
  }
}

variable "remove_parts_after_days" {
  description = "Parts of unfinished uploads of this age are removed. Longer than the longest save may take."
  type        = number
  default     = 7
  nullable    = false

  validation {
    condition     = var.remove_parts_after_days >= 1 && floor(var.remove_parts_after_days) == var.remove_parts_after_days
    error_message = "A whole number of days, at least 1."
  }
}

variable "access_logs_bucket" {
  description = "The bucket that Google writes a line for each request to, in objects that begin with <name>. It has to let cloud-storage-analytics@google.com create objects. Null: no access logs."
  type        = string
  default     = null

  validation {
    condition     = var.access_logs_bucket == null || can(regex("^[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]$", var.access_logs_bucket))
    error_message = "The name of a bucket, without gs://."
  }
}

variable "force_destroy" {
  description = "Lets terraform destroy remove a bucket that still holds checkpoints."
  type        = bool
  default     = false
  nullable    = false
}

variable "labels" {
  description = "Labels of the bucket."
  type        = map(string)
  default     = {}
  nullable    = false
}
