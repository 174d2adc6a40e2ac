# Nothing of the provider's, and no secret: the machine's service account is how it reaches the bucket.
locals {
  startup_script = templatefile("${path.module}/run.sh.tftpl", {
    source_url = var.source_url
    bucket_uri = var.bucket_uri
  })
}
