# One bucket, and the roles of one project's training jobs in it. Copy it, and change what is yours.
terraform {
  required_version = ">= 1.5"

  required_providers {
    aws = {
      source  = "hashicorp/aws"
      version = ">= 5.0, < 7.0"
    }
  }
}

provider "aws" {
  region = var.region
}

module "bucket" {
  source = "../../modules/s3-bucket"

  name           = var.bucket_name
  create_kms_key = var.use_kms
}

module "roles" {
  source = "../../modules/s3-roles"

  bucket_arn         = module.bucket.arn
  prefix             = var.prefix
  kms_key_arn        = module.bucket.kms_key_arn
  trusted_principals = var.trusted_principals
  eks_cluster_name   = var.eks_cluster_name
  oidc_provider_arn  = var.oidc_provider_arn
  service_accounts   = var.service_accounts

  trusted_services = merge(var.trusted_services, {
    janitor = concat(lookup(var.trusted_services, "janitor", []), var.gc_image == null ? [] : ["ecs-tasks.amazonaws.com"])
  })
}

# Nothing is scheduled without an image.
module "gc" {
  source = "../../modules/gc-job-aws"
  count  = var.gc_image == null ? 0 : 1

  uri        = var.prefix == "" ? module.bucket.uri : "${module.bucket.uri}/${var.prefix}"
  image      = var.gc_image
  role_arn   = module.roles.role_arns["janitor"]
  vpc_id     = var.gc_vpc_id
  subnet_ids = var.gc_subnet_ids
}
