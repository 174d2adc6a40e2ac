# Nothing of the provider's, and no secret: the instance's role is how it reaches the bucket.
locals {
  user_data = templatefile("${path.module}/run.sh.tftpl", {
    source_url = var.source_url
    bucket_uri = var.bucket_uri
  })
}
