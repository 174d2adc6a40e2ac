variable "container_id" {
  description = "The resource ID of the container of the checkpoints."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^/subscriptions/[^/]+/resourceGroups/[^/]+/providers/Microsoft.Storage/storageAccounts/[a-z0-9]+/blobServices/default/containers/[a-z0-9-]+$", var.container_id))
    error_message = "The azure-container module's output container_id: /subscriptions/…/containers/<name>."
  }
}

variable "resource_group_name" {
  description = "The resource group that identities are made in."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[A-Za-z0-9_.()-]{0,89}[A-Za-z0-9_()-]$", var.resource_group_name))
    error_message = "The group's name alone, without /subscriptions/…."
  }
}

variable "location" {
  description = "The region that identities are made in."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z]+[a-z0-9]*$", var.location))
    error_message = "A region, such as westeurope."
  }
}

variable "name_prefix" {
  description = "The first part of the names of roles and identities; -trainer, -reader and -janitor follow."
  type        = string
  default     = "cloudckpt"
  nullable    = false

  validation {
    condition     = can(regex("^[A-Za-z0-9][A-Za-z0-9_-]{2,23}$", var.name_prefix))
    error_message = "3 to 24 letters, digits, hyphens and underscores, a letter or digit first."
  }
}

variable "principal_ids" {
  description = "For each role, the object IDs of the users, groups and identities that have it besides the role's own identity."
  type = object({
    trainer = optional(list(string), [])
    reader  = optional(list(string), [])
    janitor = optional(list(string), [])
  })
  default  = {}
  nullable = false

  validation {
    condition = alltrue([
      for id in flatten(values(var.principal_ids)) : can(regex("^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$", id))
    ])
    error_message = "Object IDs, in lower case: 00000000-0000-0000-0000-000000000000."
  }
}

variable "oidc_issuer_url" {
  description = "The OIDC issuer of an AKS cluster, where service accounts are to act as the roles."
  type        = string
  default     = null

  validation {
    condition     = var.oidc_issuer_url == null || can(regex("^https://[^*]+$", var.oidc_issuer_url))
    error_message = "The cluster's oidc_issuer_url: https://…."
  }
}

variable "service_accounts" {
  description = "For each role, the service accounts of the cluster that may act as it, as <namespace>:<name>. Such a role gets an identity of its own. They need oidc_issuer_url."
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

variable "trainer_may_delete" {
  description = "Lets the trainer remove its own data: the rest of failed saves, overwritten checkpoints, steps that retention drops. Without it, all of these stay until gc runs."
  type        = bool
  default     = true
  nullable    = false
}

variable "tags" {
  description = "Tags of the identities."
  type        = map(string)
  default     = {}
  nullable    = false
}
