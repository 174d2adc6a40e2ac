output "name" {
  description = "The machine, whose serial console has the result: gcloud compute instances get-serial-port-output <it>."
  value       = google_compute_instance.this.name
}
