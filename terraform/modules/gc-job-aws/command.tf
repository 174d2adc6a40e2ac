# No resource and no data source here: `terraform console` evaluates it without the provider, and so the tests do.
locals {
  command = ["gc", var.uri, "--older-than", var.older_than, "--yes"]
}
