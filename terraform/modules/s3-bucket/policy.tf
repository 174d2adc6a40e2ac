# No resource and no data source here: `terraform console` evaluates it without the provider, and so the tests do.
locals {
  arn = "arn:${var.partition}:s3:::${var.name}"

  bucket_policy = jsonencode({
    Version = "2012-10-17"
    Statement = concat(
      [
        {
          Sid       = "OnlyOverTLS"
          Effect    = "Deny"
          Principal = "*"
          Action    = "s3:*"
          Resource  = [local.arn, "${local.arn}/*"]
          Condition = { Bool = { "aws:SecureTransport" = "false" } }
        },
        {
          Sid       = "NoOldTLS"
          Effect    = "Deny"
          Principal = "*"
          Action    = "s3:*"
          Resource  = [local.arn, "${local.arn}/*"]
          Condition = { NumericLessThan = { "s3:TlsVersion" = "1.2" } }
        },
      ],
      # https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes-enforce.html
      var.require_conditional_commits ? [
        {
          Sid       = "ManifestsAreNeverReplaced"
          Effect    = "Deny"
          Principal = "*"
          Action    = "s3:PutObject"
          Resource  = ["${local.arn}/manifest.json", "${local.arn}/manifest.*.json", "${local.arn}/*/manifest.json", "${local.arn}/*/manifest.*.json"]
          Condition = {
            Null = { "s3:if-none-match" = "true" }
            Bool = { "s3:ObjectCreationOperation" = "true" }
          }
        },
      ] : [],
    )
  })

  # Which requests to make, the roles' own policies say.
  vpc_endpoint_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Sid       = "OnlyThisBucket"
      Effect    = "Allow"
      Principal = "*"
      Action    = "s3:*"
      Resource  = [local.arn, "${local.arn}/*"]
    }]
  })
}
