variable "bucket_uri" {
  description = "The folder that the benchmark writes to. It removes all that it wrote."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^gs://[a-z0-9][a-z0-9._-]{1,61}[a-z0-9](/[A-Za-z0-9_.=-]+)+$", var.bucket_uri))
    error_message = "gs://<bucket>/<folder>, of letters, digits and _.=-: it becomes part of a command."
  }
}

variable "project" {
  description = "The project that the machine belongs to."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{4,28}[a-z0-9]$", var.project))
    error_message = "The project's ID, which has 6 to 30 lower-case letters, digits and hyphens."
  }
}

variable "zone" {
  description = "The zone that the machine runs in: one of the bucket's region."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z]+-[a-z]+[0-9]+-[a-z]$", var.zone))
    error_message = "A zone, such as europe-west4-a."
  }
}

variable "subnetwork" {
  description = "A subnetwork from which Google's services, the package index and source_url can be reached, through Cloud NAT. The machine gets no public address."
  type        = string
  nullable    = false

  validation {
    condition     = length(var.subnetwork) > 0
    error_message = "The subnetwork's name or link."
  }
}

variable "service_account_email" {
  description = "The service account that the machine runs as: the gcs-roles module's trainer, or one that has its role."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9-]+@[a-z0-9.-]+\\.gserviceaccount\\.com$", var.service_account_email))
    error_message = "<name>@<project>.iam.gserviceaccount.com."
  }
}

variable "machine_type" {
  description = "The type of the machine. Use the type of the machines that train, or one with a similar network."
  type        = string
  default     = "c3-standard-22"
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9]+-[a-z0-9-]+$", var.machine_type))
    error_message = "A machine type, such as c3-standard-22."
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
  description = "The name of the machine."
  type        = string
  default     = "cloudckpt-bench"
  nullable    = false

  validation {
    condition     = can(regex("^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$", var.name))
    error_message = "Lower-case letters, digits and hyphens, a letter first."
  }
}

variable "labels" {
  description = "Labels of the machine."
  type        = map(string)
  default     = {}
  nullable    = false
}
