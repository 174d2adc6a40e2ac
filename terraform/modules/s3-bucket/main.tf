resource "aws_s3_bucket" "this" {
  bucket        = var.name
  force_destroy = var.force_destroy
  tags          = var.tags

  lifecycle {
    precondition {
      condition     = !(var.create_kms_key && var.kms_key_arn != null)
      error_message = "Pass kms_key_arn, or create_kms_key = true, not both."
    }
  }
}

resource "aws_s3_bucket_public_access_block" "this" {
  bucket = aws_s3_bucket.this.id

  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_ownership_controls" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_policy" "this" {
  bucket = aws_s3_bucket.this.id
  policy = local.bucket_policy

  # S3 refuses a policy while it is finding out whether the bucket may have a public one.
  depends_on = [aws_s3_bucket_public_access_block.this]
}

resource "aws_kms_key" "this" {
  count = var.create_kms_key ? 1 : 0

  description             = "Checkpoints in ${var.name}"
  enable_key_rotation     = true
  deletion_window_in_days = 30
  tags                    = var.tags
}

locals {
  kms_key_arn = var.create_kms_key ? one(aws_kms_key.this[*].arn) : var.kms_key_arn
  uses_kms    = var.create_kms_key || var.kms_key_arn != null
}

resource "aws_s3_bucket_server_side_encryption_configuration" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    # Without a bucket key, every part of every upload is a request to KMS.
    bucket_key_enabled = local.uses_kms

    apply_server_side_encryption_by_default {
      sse_algorithm     = local.uses_kms ? "aws:kms" : "AES256"
      kms_master_key_id = local.kms_key_arn
    }
  }
}

# A bucket without this has no versions (S3 calls that Disabled). Turning versioning off removes this, which suspends it.
resource "aws_s3_bucket_versioning" "this" {
  count = var.versioning ? 1 : 0

  bucket = aws_s3_bucket.this.id

  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_logging" "this" {
  count = var.access_logs_bucket == null ? 0 : 1

  bucket        = aws_s3_bucket.this.id
  target_bucket = var.access_logs_bucket
  target_prefix = "${var.name}/"
}

# Nothing that is current expires by age, under no prefix: a manifest names data that can be as old as it likes (a
# resumed copy takes up data of an earlier one), and which data no manifest names, only `cloudckpt gc` can tell.
resource "aws_s3_bucket_lifecycle_configuration" "this" {
  bucket = aws_s3_bucket.this.id

  rule {
    id     = "abort-unfinished-uploads"
    status = "Enabled"

    filter {}

    abort_incomplete_multipart_upload {
      days_after_initiation = var.abort_uploads_after_days
    }
  }

  # Also where versioning is off by now: versions of before stay otherwise.
  rule {
    id     = "remove-what-was-deleted"
    status = "Enabled"

    filter {}

    noncurrent_version_expiration {
      noncurrent_days = var.keep_noncurrent_days
    }

    expiration {
      expired_object_delete_marker = true
    }
  }

  depends_on = [aws_s3_bucket_versioning.this]
}
