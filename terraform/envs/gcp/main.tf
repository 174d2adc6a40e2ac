# One bucket, and the roles of one project's training jobs in it. Copy it, and change what is yours.
terraform {
  required_version = ">= 1.5"

  required_providers {
    google = {
      source  = "hashicorp/google"
      version = ">= 5.30, < 8.0"
    }
  }
}

provider "google" {
  project = var.project
}

module "bucket" {
  source = "../../modules/gcs-bucket"

  name         = var.bucket_name
  project      = var.project
  location     = var.location
  kms_key_name = var.kms_key_name
}

module "roles" {
  source = "../../modules/gcs-roles"

  bucket           = module.bucket.name
  project          = var.project
  prefix           = var.prefix
  members          = var.members
  service_accounts = var.service_accounts
  own_accounts     = var.gc_image == null ? [] : ["janitor"]
}

# Nothing is scheduled without an image.
module "gc" {
  source = "../../modules/gc-job-gcp"
  count  = var.gc_image == null ? 0 : 1

  uri                   = var.prefix == "" ? module.bucket.uri : "${module.bucket.uri}/${var.prefix}"
  image                 = var.gc_image
  project               = var.project
  region                = var.location
  service_account_email = module.roles.service_account_emails["janitor"]
}
