resource "google_cloud_run_v2_job" "this" {
  name                = var.name
  project             = var.project
  location            = var.region
  labels              = var.labels
  deletion_protection = false

  template {
    template {
      service_account = var.service_account_email
      max_retries     = 1
      timeout         = "86400s"

      containers {
        image = var.image
        args  = local.command

        resources {
          limits = {
            cpu    = "1"
            memory = "2Gi"
          }
        }
      }
    }
  }
}

# Starts the job, and may do nothing else. The container itself runs as var.service_account_email.
resource "google_service_account" "scheduler" {
  project      = var.project
  account_id   = "${var.name}-scheduler"
  display_name = "Starts ${var.name}"
}

resource "google_cloud_run_v2_job_iam_member" "scheduler" {
  name     = google_cloud_run_v2_job.this.name
  project  = var.project
  location = var.region
  role     = "roles/run.invoker"
  member   = google_service_account.scheduler.member
}

resource "google_cloud_scheduler_job" "this" {
  name        = var.name
  project     = var.project
  region      = var.region
  description = "cloudckpt gc ${var.uri}"
  schedule    = var.schedule
  time_zone   = "Etc/UTC"

  retry_config {
    retry_count = 3
  }

  http_target {
    http_method = "POST"
    uri         = "https://run.googleapis.com/v2/${google_cloud_run_v2_job.this.id}:run"

    oauth_token {
      service_account_email = google_service_account.scheduler.email
    }
  }

  depends_on = [google_cloud_run_v2_job_iam_member.scheduler]
}
