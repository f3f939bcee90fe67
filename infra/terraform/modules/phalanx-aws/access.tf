# What each process may do in storage. A role is taken by one Kubernetes service account (IRSA); nothing is shared.
#
#                data bucket                         checkpoint bucket
#   data         reads, creates registry/datasets    reads, creates journal entries (damage)
#   train        reads, creates registry/jobs        reads, creates events, attempts, journal
#   checkpoint   reads, creates registry/pins        reads, creates manifests; alone deletes, and only checkpoints
#   monitor      reads                               reads
#   ranks        read                                read their project, create what their job's attempts write, but no manifest
#
# Where it says ranks, it means the agent that holds them, too. train and ranks also create probe-<id>/object, by which they try
# whether the store keeps its promise; what they may not remove stays.
#
# Nobody may delete a version, change a bucket, or replace an object (see OnlyCreate in storage.tf).

locals {
  data_arn        = aws_s3_bucket.this["data"].arn
  checkpoints_arn = aws_s3_bucket.this["checkpoints"].arn

  # Below a job's root; ? stands for one digit of a padded number.
  any_job        = "${local.checkpoints_arn}/projects/*/jobs/*"
  any_attempt    = "a????????"
  any_checkpoint = "${local.any_attempt}/s????????"
  any_probe      = "probe-*/object"

  # What makes a checkpoint exist, and what stays of one that retention removed.
  manifests = [for name in ["manifest.json", "retired.json"] : "${local.any_job}/${local.any_checkpoint}/${name}"]

  creates = {
    data = ["${local.data_arn}/registry/datasets/*", "${local.any_job}/journal/*"]
    train = [
      "${local.data_arn}/registry/jobs/*",
      "${local.data_arn}/${local.any_probe}",
      "${local.any_job}/events/*",
      "${local.any_job}/attempts/*",
      "${local.any_job}/journal/*",
      "${local.any_job}/${local.any_probe}",
    ]
    checkpoint = concat(["${local.data_arn}/registry/pins/*"], local.manifests)
    monitor    = []
  }
  deletes = {
    checkpoint = ["${local.any_job}/${local.any_checkpoint}/*"]
  }

  issuer = trimprefix(aws_eks_cluster.this.identity[0].oidc[0].issuer, "https://")
}

resource "aws_iam_openid_connect_provider" "this" {
  url            = aws_eks_cluster.this.identity[0].oidc[0].issuer
  client_id_list = ["sts.amazonaws.com"]
  tags           = local.tags
}

locals {
  # Which service account takes which role.
  service_accounts = merge(
    { for name in local.services : name => "${var.service_namespace}:${name}" },
    { for name, scope in var.rank_scopes : "ranks-${name}" => "${scope.namespace}:${scope.service_account}" },
  )

  trust = {
    for role, service_account in local.service_accounts : role => jsonencode({
      Version = "2012-10-17"
      Statement = [{
        Effect    = "Allow"
        Action    = "sts:AssumeRoleWithWebIdentity"
        Principal = { Federated = aws_iam_openid_connect_provider.this.arn }
        Condition = {
          StringEquals = {
            "${local.issuer}:sub" = "system:serviceaccount:${service_account}"
            "${local.issuer}:aud" = "sts.amazonaws.com"
          }
        }
      }]
    })
  }

  # Statements that hold for some, as lists of none or one.
  reads_key  = var.kms_key_arn == null ? [] : [{ Sid = "Key", Effect = "Allow", Action = ["kms:Decrypt"], Resource = [var.kms_key_arn] }]
  writes_key = [for each in local.reads_key : merge(each, { Action = ["kms:Decrypt", "kms:GenerateDataKey"] })]
}

resource "aws_iam_role" "service" {
  for_each = local.services

  name               = "${var.name}-${each.key}"
  description        = "Phalanx ${var.name}: the ${each.key} service"
  assume_role_policy = local.trust[each.key]
  tags               = local.tags
}

resource "aws_iam_role_policy" "service" {
  for_each = local.services

  name = "storage"
  role = aws_iam_role.service[each.key].id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = concat(
      [
        {
          Sid      = "List"
          Effect   = "Allow"
          Action   = ["s3:ListBucket"]
          Resource = [local.data_arn, local.checkpoints_arn]
        },
        {
          Sid      = "Read"
          Effect   = "Allow"
          Action   = ["s3:GetObject"]
          Resource = ["${local.data_arn}/*", "${local.checkpoints_arn}/projects/*"]
        },
      ],
      [
        for keys in [local.creates[each.key]] : {
          Sid      = "Create"
          Effect   = "Allow"
          Action   = ["s3:PutObject", "s3:AbortMultipartUpload"]
          Resource = keys
        } if length(keys) > 0
      ],
      [
        for keys in [lookup(local.deletes, each.key, [])] : {
          Sid      = "Delete"
          Effect   = "Allow"
          Action   = ["s3:DeleteObject"]
          Resource = keys
        } if length(keys) > 0
      ],
      length(local.creates[each.key]) > 0 ? local.writes_key : local.reads_key,
    )
  })
}

resource "aws_iam_role" "ranks" {
  for_each = var.rank_scopes

  name               = "${var.name}-ranks-${each.key}"
  description        = "Phalanx ${var.name}: ranks of projects/${each.value.project}/jobs/${replace(each.value.job, "/[*?]/", "_")}"
  assume_role_policy = local.trust["ranks-${each.key}"]
  tags               = local.tags
}

resource "aws_iam_role_policy" "ranks" {
  for_each = var.rank_scopes

  name = "storage"
  role = aws_iam_role.ranks[each.key].id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = concat(
      [
        {
          Sid      = "ListData"
          Effect   = "Allow"
          Action   = ["s3:ListBucket"]
          Resource = [local.data_arn]
        },
        {
          Sid       = "ListProject"
          Effect    = "Allow"
          Action    = ["s3:ListBucket"]
          Resource  = [local.checkpoints_arn]
          Condition = { StringLike = { "s3:prefix" = ["projects/${each.value.project}/*"] } }
        },
        # The whole project, because a fork starts from another job's checkpoint.
        {
          Sid      = "Read"
          Effect   = "Allow"
          Action   = ["s3:GetObject"]
          Resource = ["${local.data_arn}/*", "${local.checkpoints_arn}/projects/${each.value.project}/*"]
        },
        {
          Sid    = "Create"
          Effect = "Allow"
          Action = ["s3:PutObject", "s3:AbortMultipartUpload"]
          Resource = [
            for key in ["job.json", "${local.any_attempt}/*", local.any_probe] :
            "${local.checkpoints_arn}/projects/${each.value.project}/jobs/${each.value.job}/${key}"
          ]
        },
        # A checkpoint exists from its manifest on, and only the checkpoint service says so.
        {
          Sid      = "NoCommit"
          Effect   = "Deny"
          Action   = ["s3:PutObject"]
          Resource = local.manifests
        },
      ],
      local.writes_key,
    )
  })
}
