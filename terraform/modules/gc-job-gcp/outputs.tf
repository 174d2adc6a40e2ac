output "job" {
  description = "The Cloud Run job, for `gcloud run jobs execute` and its log."
  value       = google_cloud_run_v2_job.this.name
}
