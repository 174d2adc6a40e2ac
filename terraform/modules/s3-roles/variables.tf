variable "bucket_arn" {
  description = "The ARN of the bucket of the checkpoints."
  type        = string
  nullable    = false

  validation {
    condition     = can(regex("^arn:aws[a-z-]*:s3:::[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$", var.bucket_arn))
    error_message = "Pass the ARN of one bucket (arn:aws:s3:::<name>), without a key and without wildcards."
  }
}

variable "prefix" {
  description = "The folder in the bucket that the roles are limited to, without slashes at its ends. Empty: the whole bucket."
  type        = string
  default     = ""
  nullable    = false

  validation {
    condition     = can(regex("^([A-Za-z0-9!_.()=+@-]+(/[A-Za-z0-9!_.()=+@-]+)*)?$", var.prefix))
    error_message = "Letters, digits and !_.()=+@- between single slashes, with none at the ends: IAM takes *, ? and $ for patterns, and the role would reach further than it says."
  }
}

variable "name_prefix" {
  description = "The first part of the roles' names; -trainer, -reader and -janitor follow."
  type        = string
  default     = "cloudckpt"
  nullable    = false

  validation {
    condition     = can(regex("^[A-Za-z0-9+=,.@_-]{1,56}$", var.name_prefix))
    error_message = "1 to 56 letters, digits and +=,.@_-."
  }
}

variable "trusted_principals" {
  description = "For each role, the ARNs of the users and roles that may assume it. A role that nobody may assume is not made."
  type = object({
    trainer = optional(list(string), [])
    reader  = optional(list(string), [])
    janitor = optional(list(string), [])
  })
  default  = {}
  nullable = false

  validation {
    condition = alltrue([
      for arn in flatten(values(var.trusted_principals)) : can(regex("^arn:aws[a-z-]*:(iam|sts)::[0-9]{12}:(root|(user|role|assumed-role)/[^*]+)$", arn))
    ])
    error_message = "Full ARNs of accounts, users or roles (arn:aws:iam::<account>:role/<name>), without wildcards: anybody could assume the role otherwise."
  }
}

variable "trusted_services" {
  description = "For each role, the services of AWS whose machines may run as it, such as ec2.amazonaws.com: the benchmark runner's, or a cluster's nodes."
  type = object({
    trainer = optional(list(string), [])
    reader  = optional(list(string), [])
    janitor = optional(list(string), [])
  })
  default  = {}
  nullable = false

  validation {
    condition = alltrue([
      for service in flatten(values(var.trusted_services)) : can(regex("^(ec2|ecs-tasks|sagemaker)\\.amazonaws\\.com(\\.cn)?$", service))
    ])
    error_message = "ec2.amazonaws.com, ecs-tasks.amazonaws.com or sagemaker.amazonaws.com: services that run a user's own programs."
  }
}

variable "eks_cluster_name" {
  description = "An EKS cluster with the Pod Identity agent, where service accounts are to have the roles. A service account has one role."
  type        = string
  default     = null

  validation {
    condition     = var.eks_cluster_name == null || can(regex("^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$", var.eks_cluster_name))
    error_message = "The cluster's name, not its ARN."
  }
}

variable "oidc_provider_arn" {
  description = "The OIDC provider of an EKS cluster, where service accounts are to assume the roles (IRSA)."
  type        = string
  default     = null

  validation {
    condition     = var.oidc_provider_arn == null || can(regex("^arn:aws[a-z-]*:iam::[0-9]{12}:oidc-provider/[^*]+$", var.oidc_provider_arn))
    error_message = "Pass the ARN of the provider (arn:aws:iam::<account>:oidc-provider/oidc.eks.<region>.amazonaws.com/id/<id>)."
  }
}

variable "service_accounts" {
  description = "For each role, the service accounts of the cluster that may assume it, as <namespace>:<name>. They need eks_cluster_name or oidc_provider_arn."
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
    error_message = "<namespace>:<name>, both in full and without wildcards: any pod of the cluster could assume the role otherwise."
  }
}

variable "trainer_may_delete" {
  description = "Lets the trainer remove its own data: the rest of failed saves, overwritten checkpoints, steps that retention drops. Without it, all of these stay until the janitor runs gc."
  type        = bool
  default     = true
  nullable    = false
}

variable "trainer_may_resume" {
  description = "Lets the trainer list unfinished uploads, which copies with Options(resume=True) continue."
  type        = bool
  default     = false
  nullable    = false
}

variable "kms_key_arn" {
  description = "The KMS key of the bucket, where it has one."
  type        = string
  default     = null

  validation {
    condition     = var.kms_key_arn == null || can(regex("^arn:aws[a-z-]*:kms:[a-z0-9-]+:[0-9]{12}:key/[A-Za-z0-9-]+$", var.kms_key_arn))
    error_message = "Pass the ARN of the key itself (arn:aws:kms:<region>:<account>:key/<id>), not of an alias."
  }
}

variable "permissions_boundary_arn" {
  description = "A policy that limits the roles, if the account requires one."
  type        = string
  default     = null

  validation {
    condition     = var.permissions_boundary_arn == null || can(regex("^arn:aws[a-z-]*:iam::([0-9]{12}|aws):policy/.+$", var.permissions_boundary_arn))
    error_message = "Pass the ARN of a policy (arn:aws:iam::<account>:policy/<name>)."
  }
}

variable "max_session_hours" {
  description = "The longest time that credentials of the roles last."
  type        = number
  default     = 12
  nullable    = false

  validation {
    condition     = var.max_session_hours >= 1 && var.max_session_hours <= 12 && floor(var.max_session_hours) == var.max_session_hours
    error_message = "A whole number of hours, from 1 to 12."
  }
}

variable "tags" {
  description = "Tags of the roles."
  type        = map(string)
  default     = {}
  nullable    = false
}
