# No resource and no data source here: `terraform console` evaluates it without the provider, and so the tests do.
# Why each action: docs/permissions.md.
locals {
  objects = var.prefix == "" ? "${var.bucket_arn}/*" : "${var.bucket_arn}/${var.prefix}/*"

  # A put to these keys alone is a commit, or a fence.
  manifests = var.prefix == "" ? [
    for pattern in ["manifest.json", "manifest.*.json", "*/manifest.json", "*/manifest.*.json"] : "${var.bucket_arn}/${pattern}"
    ] : [
    for pattern in ["manifest.json", "manifest.*.json", "*/manifest.json", "*/manifest.*.json"] : "${var.bucket_arn}/${var.prefix}/${pattern}"
  ]

  list = merge(
    {
      Sid      = "List"
      Effect   = "Allow"
      Action   = ["s3:ListBucket"]
      Resource = [var.bucket_arn]
    },
    var.prefix == "" ? {} : { Condition = { StringLike = { "s3:prefix" = ["${var.prefix}/*"] } } },
  )

  # S3 has no condition on the prefix for this one. It shows names, and starts nothing.
  list_uploads = {
    Sid      = "ListUploads"
    Effect   = "Allow"
    Action   = ["s3:ListBucketMultipartUploads"]
    Resource = [var.bucket_arn]
  }

  trainer_actions = concat(
    ["s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"],
    var.trainer_may_delete ? ["s3:DeleteObject"] : [],
    # With SSE-KMS a part's token does not tell which of two tries of it counts: that is asked.
    var.trainer_may_resume || var.kms_key_arn != null ? ["s3:ListMultipartUploadParts"] : [],
  )

  kms_actions = {
    # A multipart upload is put together by whoever can decrypt its parts.
    trainer = ["kms:GenerateDataKey", "kms:Decrypt"]
    reader  = ["kms:Decrypt"]
    janitor = ["kms:GenerateDataKey", "kms:Decrypt"]
  }

  statements = {
    trainer = concat(
      [local.list],
      var.trainer_may_delete || var.trainer_may_resume ? [local.list_uploads] : [],
      [{ Sid = "Save", Effect = "Allow", Action = local.trainer_actions, Resource = [local.objects] }],
    )
    reader = [
      local.list,
      { Sid = "Load", Effect = "Allow", Action = ["s3:GetObject"], Resource = [local.objects] },
    ]
    janitor = [
      local.list,
      local.list_uploads,
      {
        Sid      = "Remove"
        Effect   = "Allow"
        Action   = ["s3:GetObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
        Resource = [local.objects]
      },
      { Sid = "Fence", Effect = "Allow", Action = ["s3:PutObject"], Resource = local.manifests },
    ]
  }

  policies = {
    for role, statements in local.statements : role => jsonencode({
      Version = "2012-10-17"
      Statement = concat(
        statements,
        var.kms_key_arn == null ? [] : [
          { Sid = "Encrypt", Effect = "Allow", Action = local.kms_actions[role], Resource = [var.kms_key_arn] },
        ],
      )
    })
  }
}
