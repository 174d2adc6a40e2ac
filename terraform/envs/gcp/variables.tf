variable "project" {
  description = "The project that all of it belongs to."
  type        = string
  nullable    = false
}

variable "bucket_name" {
  description = "The bucket's name."
  type        = string
  nullable    = false
}

variable "location" {
  description = "The region of the machines that train."
  type        = string
  nullable    = false
}

variable "prefix" {
  description = "The folder that the roles are limited to. Empty: the whole bucket."
  type        = string
  default     = ""
  nullable    = false
}

variable "kms_key_name" {
  description = "As in the module gcs-bucket: the Cloud KMS key that objects are encrypted with."
  type        = string
  default     = null
}

variable "members" {
  description = "As in the module gcs-roles: who has each role."
  type        = map(list(string))
  default     = {}
  nullable    = false
}

variable "service_accounts" {
  description = "As in the module gcs-roles: the cluster's service accounts that may act as each role."
  type        = map(list(string))
  default     = {}
  nullable    = false
}

variable "gc_image" {
  description = "As in the module gc-job-gcp: the image that runs gc each night. Null: nothing is scheduled."
  type        = string
  default     = null
}
