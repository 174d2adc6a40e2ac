variable "region" {
  description = "The region of the machines that train."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^[a-z]{2}(-[a-z]+)+-[0-9]$", var.region))
    error_message = "A region, such as eu-west-1."
  }
}

variable "bucket_name" {
  description = "The bucket's name."
  type        = string
  nullable    = false
}

variable "prefix" {
  description = "The folder that the roles are limited to. Empty: the whole bucket."
  type        = string
  default     = ""
  nullable    = false
}

variable "use_kms" {
  description = "Encrypts objects with a KMS key of the bucket's own."
  type        = bool
  default     = false
  nullable    = false
}

variable "trusted_principals" {
  description = "As in the module s3-roles: who may assume each role."
  type        = map(list(string))
  default     = {}
  nullable    = false
}

variable "trusted_services" {
  description = "As in the module s3-roles: the services whose machines may run as each role."
  type        = map(list(string))
  default     = {}
  nullable    = false
}

variable "eks_cluster_name" {
  description = "As in the module s3-roles: an EKS cluster with the Pod Identity agent."
  type        = string
  default     = null
}

variable "oidc_provider_arn" {
  description = "As in the module s3-roles: the OIDC provider of an EKS cluster."
  type        = string
  default     = null
}

variable "service_accounts" {
  description = "As in the module s3-roles: the cluster's service accounts that may assume each role."
  type        = map(list(string))
  default     = {}
  nullable    = false
}

variable "gc_image" {
  description = "As in the module gc-job-aws: the image that runs gc each night. Null: nothing is scheduled."
  type        = string
  default     = null
}

variable "gc_vpc_id" {
  description = "As in the module gc-job-aws: the VPC that gc runs in. It is needed with gc_image."
  type        = string
  default     = null
}

variable "gc_subnet_ids" {
  description = "As in the module gc-job-aws: the subnets that gc runs in. They are needed with gc_image."
  type        = list(string)
  default     = []
  nullable    = false
}
