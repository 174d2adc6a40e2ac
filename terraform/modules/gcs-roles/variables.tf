variable "bucket" {
  description = "The name of the bucket of the checkpoints. It needs uniform bucket-level access."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]$", var.bucket))
    error_message = "The bucket's name alone, without gs://."
  }
}

variable "project" {
  description = "The project in which roles and service accounts are made."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{4,28}[a-z0-9]$", var.project))
    error_message = "The project's ID, which has 6 to 30 lower-case letters, digits and hyphens."
  }
}

variable "prefix" {
  description = "The folder in the bucket that the roles are limited to, without slashes at its ends. Empty: the whole bucket."
  type        = string
  default     = ""
  nullable    = false

  validation {
    condition     = can(regex("^([A-Za-z0-9!_.()=+@-]+(/[A-Za-z0-9!_.()=+@-]+)*)?$", var.prefix))
    error_message = "Letters, digits and !_.()=+@- between single slashes, with none at the ends: others could end the condition that the prefix stands in."
  }
}

variable "name_prefix" {
  description = "The first part of the names of roles and service accounts."
  type        = string
  default     = "cloudckpt"
  nullable    = false

  validation {
    condition     = can(regex("^[a-z][a-z0-9]{2,20}$", var.name_prefix))
    error_message = "3 to 21 lower-case letters and digits, a letter first: roles allow no hyphens, service accounts no underscores."
  }
}

variable "members" {
  description = "For each role, the members that have it besides the role's own service account: serviceAccount:<email>, principal://…."
  type = object({
    trainer = optional(list(string), [])
    reader  = optional(list(string), [])
    janitor = optional(list(string), [])
  })
  default  = {}
  nullable = false

  validation {
    condition = alltrue([
      for member in flatten(values(var.members)) : can(regex("^((user|group|serviceAccount):[^*]+@[^*]+|principal(Set)?://iam\\.googleapis\\.com/[^*]+)$", member))
    ])
    error_message = "user:, group: or serviceAccount: with an address, or principal://iam.googleapis.com/…; never everybody (allUsers, allAuthenticatedUsers)."
  }
}

variable "service_accounts" {
  description = "For each role, the Kubernetes service accounts that may act as it (Workload Identity on GKE), as <namespace>:<name>. Such a role gets a Google service account of its own."
  type = object({
    trainer = optional(list(string), [])
    reader  = optional(list(string), [])
    janitor = optional(list(string), [])
  })
  default  = {}
  nullable = false

  validation {
    condition = alltrue([
      for account in flatten(values(var.service_accounts)) : can(regex("^[a-z0-9]([a-z0-9-]*[a-z0-9])?:[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", account))
    ])
    error_message = "<namespace>:<name>, both in full and without wildcards."
  }
}

variable "own_accounts" {
  description = "Roles that get a Google service account of their own though no Kubernetes service account acts as them: janitor for gc-job-gcp, trainer for virtual machines."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = length(setsubtract(var.own_accounts, ["trainer", "reader", "janitor"])) == 0
    error_message = "trainer, reader or janitor."
  }
}

variable "workload_identity_project" {
  description = "The project of the GKE cluster that the service accounts live in. Without one, it is project."
  type        = string
  default     = null

  validation {
    condition     = var.workload_identity_project == null || can(regex("^[a-z][a-z0-9-]{4,28}[a-z0-9]$", var.workload_identity_project))
    error_message = "The project's ID, which has 6 to 30 lower-case letters, digits and hyphens."
  }
}

variable "trainer_may_delete" {
  description = "Lets the trainer remove its own data. Without it, the parts of large objects stay until the bucket's lifecycle rule removes them. They take about as much space as the checkpoint."
  type        = bool
  default     = true
  nullable    = false
}
