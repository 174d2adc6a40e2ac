variable "account_name" {
  description = "The storage account's name, which no other account of Azure may have."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9]{3,24}$", var.account_name))
    error_message = "3 to 24 lower-case letters and digits."
  }
}

variable "container_name" {
  description = "The container's name."
  type        = string
  default     = "checkpoints"
  nullable    = false

  validation {
    condition     = can(regex("^[a-z0-9](-?[a-z0-9])+$", var.container_name)) && length(var.container_name) >= 3 && length(var.container_name) <= 63
    error_message = "3 to 63 lower-case letters, digits and single hyphens, with a letter or digit at both ends."
  }
}

variable "resource_group_name" {
  description = "The resource group that the account belongs to."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[A-Za-z0-9_.()-]{0,89}[A-Za-z0-9_()-]$", var.resource_group_name))
    error_message = "The group's name alone, without /subscriptions/…."
  }
}

variable "location" {
  description = "The region of the machines that train, such as westeurope."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z]+[a-z0-9]*$", var.location))
    error_message = "A region, such as westeurope."
  }
}

variable "replication" {
  description = "The copies that Azure keeps: LRS in one data centre, ZRS in three zones of the region, GRS or GZRS in a second region too."
  type        = string
  default     = "ZRS"
  nullable    = false

  validation {
    condition     = contains(["LRS", "ZRS", "GRS", "GZRS"], var.replication)
    error_message = "One of LRS, ZRS, GRS and GZRS."
  }
}

variable "soft_delete_days" {
  description = "Azure can restore deleted and replaced blobs for this number of days, and bills them for as long. 0 turns soft delete off."
  type        = number
  default     = 0
  nullable    = false

  validation {
    condition     = var.soft_delete_days >= 0 && var.soft_delete_days <= 365 && floor(var.soft_delete_days) == var.soft_delete_days
    error_message = "0, or a whole number of days up to 365."
  }
}

variable "allowed_subnet_ids" {
  description = "The only subnets that reach the account. Each needs the service endpoint Microsoft.Storage. Empty: any network, with credentials."
  type        = list(string)
  default     = []
  nullable    = false

  validation {
    condition     = alltrue([for id in var.allowed_subnet_ids : can(regex("^/subscriptions/[^/]+/resourceGroups/[^/]+/providers/Microsoft.Network/virtualNetworks/[^/]+/subnets/[^/]+$", id))])
    error_message = "Resource IDs of subnets: /subscriptions/…/subnets/<name>."
  }
}

variable "access_logs_workspace_id" {
  description = "The Log Analytics workspace that gets a line for each request to a blob. Null: no access logs."
  type        = string
  default     = null

  validation {
    condition     = var.access_logs_workspace_id == null || can(regex("^/subscriptions/[^/]+/resourceGroups/[^/]+/providers/Microsoft.OperationalInsights/workspaces/[^/]+$", var.access_logs_workspace_id))
    error_message = "The resource ID of a workspace: /subscriptions/…/workspaces/<name>."
  }
}

variable "tags" {
  description = "Tags of the account."
  type        = map(string)
  default     = {}
  nullable    = false
}
