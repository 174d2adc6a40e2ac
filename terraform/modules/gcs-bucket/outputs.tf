output "name" {
  description = "The bucket's name, for the gs:// URI."
  value       = google_storage_bucket.this.name
}

output "uri" {
  description = "The root of the bucket's checkpoints."
  value       = "gs://${google_storage_bucket.this.name}"
}
