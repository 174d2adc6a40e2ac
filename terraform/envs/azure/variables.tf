variable "subscription_id" {
  description = "The subscription that all of it belongs to."
  type        = string
  nullable    = false
}

variable "resource_group_name" {
  description = "The name of the resource group that is made."
  type        = string
  default     = "cloudckpt"
  nullable    = false
}

variable "location" {
  description = "The region of the machines that train."
  type        = string
  nullable    = false
}

variable "account_name" {
  description = "The storage account's name."
  type        = string
  nullable    = false
}

variable "principal_ids" {
  description = "As in the module azure-roles: the object IDs that have each role."
  type        = map(list(string))
  default     = {}
  nullable    = false
}

variable "oidc_issuer_url" {
  description = "As in the module azure-roles: the OIDC issuer of an AKS cluster."
  type        = string
  default     = null
}

variable "service_accounts" {
  description = "As in the module azure-roles: the cluster's service accounts that may act as each role."
  type        = map(list(string))
  default     = {}
  nullable    = false
}
