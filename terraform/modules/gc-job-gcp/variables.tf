variable "uri" {
  description = "The folder that gc cleans up, with all below it."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^gs://[a-z0-9][a-z0-9._-]{1,61}[a-z0-9](/[A-Za-z0-9!_.()=+@-]+)*$", var.uri))
    error_message = "gs://<bucket> or gs://<bucket>/<folder>, without a slash at the end."
  }
}

variable "image" {
  description = "A container image whose entry point is cloudckpt. The overview has a Dockerfile."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9][A-Za-z0-9./:@_-]+$", var.image))
    error_message = "An image's name, such as europe-west4-docker.pkg.dev/my-project/images/cloudckpt:1."
  }
}

variable "project" {
  description = "The project that the job belongs to."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{4,28}[a-z0-9]$", var.project))
    error_message = "The project's ID, which has 6 to 30 lower-case letters, digits and hyphens."
  }
}

variable "region" {
  description = "The region that the job runs in: the bucket's."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z]+-[a-z]+[0-9]+$", var.region))
    error_message = "A region, such as europe-west4."
  }
}

variable "service_account_email" {
  description = "The service account that gc runs as: the gcs-roles module's janitor, with janitor among its own_accounts."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9-]+@[a-z0-9.-]+\\.gserviceaccount\\.com$", var.service_account_email))
    error_message = "<name>@<project>.iam.gserviceaccount.com."
  }
}

variable "schedule" {
  description = "The time of each run, in UTC, as cron takes it."
  type        = string
  default     = "0 3 * * *"
  nullable    = false

  validation {
    condition     = can(regex("^[^ ]+( [^ ]+){4}$", var.schedule))
    error_message = "<minute> <hour> <day> <month> <weekday>, such as 0 3 * * *."
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

variable "name" {
  description = "The name of the job and of its schedule."
  type        = string
  default     = "cloudckpt-gc"
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,18}[a-z0-9]$", var.name))
    error_message = "3 to 20 lower-case letters, digits and hyphens, a letter first."
  }
}

variable "labels" {
  description = "Labels of the job."
  type        = map(string)
  default     = {}
  nullable    = false
}
