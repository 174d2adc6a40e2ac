resource "google_storage_bucket" "this" {
  name     = var.name
  project  = var.project
  location = var.location
  labels   = var.labels

  force_destroy               = var.force_destroy
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"

  versioning {
    enabled = var.versioning
  }

  soft_delete_policy {
    retention_duration_seconds = var.soft_delete_days * 86400
  }

  dynamic "logging" {
    for_each = var.access_logs_bucket == null ? [] : [var.access_logs_bucket]

    content {
      log_bucket        = logging.value
      log_object_prefix = var.name
    }
  }

  dynamic "encryption" {
    for_each = var.kms_key_name == null ? [] : [var.kms_key_name]

    content {
      default_kms_key_name = encryption.value
    }
  }

  # Nothing else that is current expires by age: a manifest names data that can be as old as it likes.
  lifecycle_rule {
    action {
      type = "Delete"
    }

    condition {
      age            = var.remove_parts_after_days
      matches_suffix = [".~part"]
    }
  }

  # What other programs' multipart uploads have left: cloudckpt begins none.
  lifecycle_rule {
    action {
      type = "AbortIncompleteMultipartUpload"
    }

    condition {
      age = var.remove_parts_after_days
    }
  }

  # Also where versioning is off by now: versions of before stay otherwise.
  lifecycle_rule {
    action {
      type = "Delete"
    }

    condition {
      days_since_noncurrent_time = var.keep_noncurrent_days
      with_state                 = "ARCHIVED"
    }
  }

  depends_on = [google_kms_crypto_key_iam_member.this]
}

data "google_storage_project_service_account" "this" {
  count = var.kms_key_name == null ? 0 : 1

  project = var.project
}

resource "google_kms_crypto_key_iam_member" "this" {
  count = var.kms_key_name == null ? 0 : 1

  crypto_key_id = var.kms_key_name
  role          = "roles/cloudkms.cryptoKeyEncrypterDecrypter"
  member        = data.google_storage_project_service_account.this[0].member
}
