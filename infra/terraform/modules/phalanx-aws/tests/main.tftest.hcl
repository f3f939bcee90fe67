# Runs without an account: the provider is a mock; what AWS would say stands in mocks/.

mock_provider "aws" {
  source = "./tests/mocks"
}

override_resource {
  target = aws_s3_bucket.this["data"]
  values = { arn = "arn:aws:s3:::line-123456789012-data" }
}

override_resource {
  target = aws_s3_bucket.this["checkpoints"]
  values = { arn = "arn:aws:s3:::line-123456789012-checkpoints" }
}

override_resource {
  target = aws_security_group.efa
  values = { id = "sg-efa" }
}

variables {
  name                  = "line"
  availability_zones    = ["us-east-1a", "us-east-1b"]
  gpu_availability_zone = "us-east-1b"
  rank_scopes = {
    llm = { namespace = "training", service_account = "ranks", project = "llm", job = "small-*" }
  }
}

run "buckets_are_versioned_encrypted_private_and_tls_only" {
  assert {
    condition     = { for key, bucket in aws_s3_bucket.this : key => bucket.bucket } == { data = "line-123456789012-data", checkpoints = "line-123456789012-checkpoints" }
    error_message = "two buckets, named after the cluster and the account"
  }
  assert {
    condition     = alltrue([for bucket in aws_s3_bucket.this : !bucket.force_destroy])
    error_message = "destroy must not empty buckets unless asked"
  }
  assert {
    condition     = length(aws_s3_bucket_versioning.this) == 2 && alltrue([for each in aws_s3_bucket_versioning.this : each.versioning_configuration[0].status == "Enabled"])
    error_message = "both buckets are versioned"
  }
  assert {
    condition     = alltrue([for each in aws_s3_bucket_server_side_encryption_configuration.this : one(one(each.rule).apply_server_side_encryption_by_default).sse_algorithm == "AES256"])
    error_message = "both buckets are encrypted"
  }
  assert {
    condition     = length(aws_s3_bucket_public_access_block.this) == 2 && alltrue([for each in aws_s3_bucket_public_access_block.this : each.block_public_acls && each.block_public_policy && each.ignore_public_acls && each.restrict_public_buckets])
    error_message = "no bucket may become public"
  }
  assert {
    condition = alltrue([
      for each in aws_s3_bucket_policy.this : anytrue([
        for statement in jsondecode(each.policy).Statement : statement.Effect == "Deny" && statement.Action == "s3:*" && try(statement.Condition.Bool["aws:SecureTransport"], "") == "false" && length(statement.Resource) == 2
      ])
    ])
    error_message = "plain HTTP is refused for bucket and objects"
  }
  assert {
    condition = alltrue([
      for each in aws_s3_bucket_policy.this : anytrue([
        for statement in jsondecode(each.policy).Statement :
        statement.Effect == "Deny" && statement.Action == "s3:PutObject" && try(statement.Condition.Null["s3:if-none-match"], "") == "true" && try(statement.Condition.Bool["s3:ObjectCreationOperation"], "") == "true"
      ])
    ])
    error_message = "a put that could replace an object is refused"
  }
}

run "lifecycle_drops_unfinished_uploads_and_old_versions_and_nothing_live" {
  assert {
    condition     = length(aws_s3_bucket_lifecycle_configuration.this) == 2
    error_message = "both buckets have a lifecycle"
  }
  assert {
    condition = alltrue(flatten([
      for each in aws_s3_bucket_lifecycle_configuration.this : [for rule in each.rule : rule.status == "Enabled" && length(rule.filter) == 1]
    ]))
    error_message = "every rule is on"
  }
  assert {
    condition     = alltrue([for each in aws_s3_bucket_lifecycle_configuration.this : one(flatten([for rule in each.rule : rule.abort_incomplete_multipart_upload[*].days_after_initiation])) == 2])
    error_message = "unfinished uploads go after two days"
  }
  assert {
    condition     = alltrue([for each in aws_s3_bucket_lifecycle_configuration.this : one(flatten([for rule in each.rule : rule.noncurrent_version_expiration[*].noncurrent_days])) == 7])
    error_message = "deleted objects can be brought back for seven days"
  }
  assert {
    condition = alltrue(flatten([
      for each in aws_s3_bucket_lifecycle_configuration.this : [for rule in each.rule : [for expiration in rule.expiration : coalesce(expiration.days, 0) == 0 || one(rule.filter).prefix == "probe-"]]
    ]))
    error_message = "no rule expires an object that is there, but those that only tried the store"
  }
}

run "only_checkpoint_deletes_and_only_checkpoints" {
  assert {
    condition = [
      for name, policy in merge(aws_iam_role_policy.service, { for key, each in aws_iam_role_policy.ranks : "ranks-${key}" => each }) : name
      if anytrue([for statement in jsondecode(policy.policy).Statement : anytrue([for action in flatten([statement.Action]) : strcontains(action, "Delete") || strcontains(action, "*")])])
    ] == ["checkpoint"]
    error_message = "one role alone may delete, and no role has an action with a pattern"
  }
  assert {
    condition = one([for statement in jsondecode(aws_iam_role_policy.service["checkpoint"].policy).Statement : statement if statement.Sid == "Delete"]) == {
      Sid      = "Delete"
      Effect   = "Allow"
      Action   = ["s3:DeleteObject"]
      Resource = ["arn:aws:s3:::line-123456789012-checkpoints/projects/*/jobs/*/a????????/s????????/*"]
    }
    error_message = "never versions, records, events, attempts or the journal"
  }
}

run "each_service_creates_its_own_keys_and_monitor_none" {
  assert {
    condition = {
      for name, policy in aws_iam_role_policy.service : name => flatten([for statement in jsondecode(policy.policy).Statement : statement.Resource if contains(flatten([statement.Action]), "s3:PutObject")])
      } == {
      data = [
        "arn:aws:s3:::line-123456789012-data/registry/datasets/*",
        "arn:aws:s3:::line-123456789012-checkpoints/projects/*/jobs/*/journal/*",
      ]
      train = [
        "arn:aws:s3:::line-123456789012-data/registry/jobs/*",
        "arn:aws:s3:::line-123456789012-data/probe-*/object",
        "arn:aws:s3:::line-123456789012-checkpoints/projects/*/jobs/*/events/*",
        "arn:aws:s3:::line-123456789012-checkpoints/projects/*/jobs/*/attempts/*",
        "arn:aws:s3:::line-123456789012-checkpoints/projects/*/jobs/*/journal/*",
        "arn:aws:s3:::line-123456789012-checkpoints/projects/*/jobs/*/probe-*/object",
      ]
      checkpoint = [
        "arn:aws:s3:::line-123456789012-data/registry/pins/*",
        "arn:aws:s3:::line-123456789012-checkpoints/projects/*/jobs/*/a????????/s????????/manifest.json",
        "arn:aws:s3:::line-123456789012-checkpoints/projects/*/jobs/*/a????????/s????????/retired.json",
      ]
      monitor = []
    }
    error_message = "what each service may create"
  }
  assert {
    condition     = distinct(flatten([for statement in jsondecode(aws_iam_role_policy.service["monitor"].policy).Statement : statement.Action])) == tolist(["s3:ListBucket", "s3:GetObject"])
    error_message = "monitor reads"
  }
  assert {
    condition     = toset(keys(aws_iam_role.service)) == toset(["data", "train", "checkpoint", "monitor"])
    error_message = "a role for each service"
  }
}

run "ranks_read_their_project_create_below_their_job_and_commit_nothing" {
  assert {
    condition = [for statement in jsondecode(aws_iam_role_policy.ranks["llm"].policy).Statement : statement.Resource if statement.Effect == "Allow" && contains(statement.Action, "s3:PutObject")] == [[
      "arn:aws:s3:::line-123456789012-checkpoints/projects/llm/jobs/small-*/job.json",
      "arn:aws:s3:::line-123456789012-checkpoints/projects/llm/jobs/small-*/a????????/*",
      "arn:aws:s3:::line-123456789012-checkpoints/projects/llm/jobs/small-*/probe-*/object",
    ]]
    error_message = "ranks create below their own job"
  }
  assert {
    condition = [for statement in jsondecode(aws_iam_role_policy.ranks["llm"].policy).Statement : statement.Resource if contains(statement.Action, "s3:GetObject")] == [[
      "arn:aws:s3:::line-123456789012-data/*",
      "arn:aws:s3:::line-123456789012-checkpoints/projects/llm/*",
    ]]
    error_message = "ranks read data and their project"
  }
  assert {
    condition = one([for statement in jsondecode(aws_iam_role_policy.ranks["llm"].policy).Statement : statement if statement.Effect == "Deny"]).Resource == [
      for name in ["manifest.json", "retired.json"] : "arn:aws:s3:::line-123456789012-checkpoints/projects/*/jobs/*/a????????/s????????/${name}"
    ]
    error_message = "no manifest by a rank"
  }
}

run "a_role_is_taken_by_exactly_one_service_account" {
  assert {
    condition = {
      for name, role in merge(aws_iam_role.service, { for key, each in aws_iam_role.ranks : "ranks-${key}" => each }) : name => one(jsondecode(role.assume_role_policy).Statement).Condition
      } == {
      for name, account in { data = "phalanx:data", train = "phalanx:train", checkpoint = "phalanx:checkpoint", monitor = "phalanx:monitor", ranks-llm = "training:ranks" } : name => {
        StringEquals = {
          "oidc.eks.us-east-1.amazonaws.com/id/ABCDEF:sub" = "system:serviceaccount:${account}"
          "oidc.eks.us-east-1.amazonaws.com/id/ABCDEF:aud" = "sts.amazonaws.com"
        }
      }
    }
    error_message = "subject and audience are compared as they are, without a pattern"
  }
}

run "gpu_nodes_have_efa_on_every_card_in_one_placement_group" {
  assert {
    condition     = tolist([for interface in aws_launch_template.gpu.network_interfaces : interface.network_card_index]) == range(32)
    error_message = "one interface on each of the 32 cards of a p5.48xlarge"
  }
  assert {
    condition     = tolist([for interface in aws_launch_template.gpu.network_interfaces : interface.interface_type]) == tolist(concat(["efa"], [for card in range(1, 32) : "efa-only"]))
    error_message = "the first card speaks IP and RDMA, the others RDMA alone"
  }
  assert {
    condition     = tolist([for interface in aws_launch_template.gpu.network_interfaces : interface.device_index]) == tolist(concat([0], [for card in range(1, 32) : 1]))
    error_message = "the first interface is the primary one"
  }
  assert {
    condition     = alltrue([for interface in aws_launch_template.gpu.network_interfaces : contains(interface.security_groups, "sg-efa")])
    error_message = "every interface is in EFA's group"
  }
  assert {
    condition = alltrue([
      for rule in [aws_vpc_security_group_ingress_rule.efa, aws_vpc_security_group_egress_rule.efa] : rule.ip_protocol == "-1" && rule.security_group_id == "sg-efa" && rule.referenced_security_group_id == "sg-efa" && rule.cidr_ipv4 == null
    ])
    error_message = "EFA's group admits its own members, in both directions, and nobody else"
  }
  assert {
    condition     = aws_placement_group.gpu.strategy == "cluster" && one(aws_launch_template.gpu.placement).group_name == aws_placement_group.gpu.name
    error_message = "GPU nodes are in the cluster placement group"
  }
  assert {
    condition     = aws_subnet.gpu.availability_zone == "us-east-1b" && one(aws_eks_node_group.gpu.subnet_ids) == aws_subnet.gpu.id
    error_message = "GPU nodes are in one subnet of their zone"
  }
  assert {
    condition     = aws_launch_template.gpu.instance_type == "p5.48xlarge" && one(aws_eks_node_group.gpu.scaling_config).desired_size == 0 && aws_eks_node_group.gpu.capacity_type == "ON_DEMAND"
    error_message = "p5.48xlarge by default, and none of them until asked for"
  }
  assert {
    condition     = length(aws_launch_template.gpu.capacity_reservation_specification) == 0 && length(aws_launch_template.gpu.instance_market_options) == 0
    error_message = "no reservation unless one is given"
  }
  assert {
    condition     = alltrue([for template in [aws_launch_template.gpu, aws_launch_template.system] : one(template.metadata_options).http_tokens == "required" && one(template.metadata_options).http_put_response_hop_limit == 1 && tobool(one(one(template.block_device_mappings).ebs).encrypted)])
    error_message = "pods cannot take the node's role, and disks are encrypted"
  }
  assert {
    condition     = one(aws_eks_node_group.gpu.taint).key == "nvidia.com/gpu" && output.efa_interfaces_per_node == 32
    error_message = "only what asks for a GPU runs there"
  }
}

run "a_capacity_block_is_used_where_one_is_given" {
  variables {
    capacity_reservation = { id = "cr-0123456789abcdef0", block = true }
    gpu_nodes            = { instance_type = "p5en.48xlarge", desired_size = 2, max_size = 2 }
  }
  override_data {
    target = data.aws_ec2_instance_type.gpu
    values = { efa_supported = true, maximum_network_cards = 16, supported_placement_strategies = ["cluster"], gpus = [{ count = 8, manufacturer = "NVIDIA", memory_size = 144384, name = "H200" }] }
  }
  assert {
    condition     = one(one(aws_launch_template.gpu.capacity_reservation_specification).capacity_reservation_target).capacity_reservation_id == "cr-0123456789abcdef0"
    error_message = "nodes go into the reservation"
  }
  assert {
    condition     = one(aws_launch_template.gpu.instance_market_options).market_type == "capacity-block" && aws_eks_node_group.gpu.capacity_type == "CAPACITY_BLOCK"
    error_message = "and are bought as a block"
  }
  assert {
    condition     = length(aws_launch_template.gpu.network_interfaces) == 16
    error_message = "as many interfaces as this type has cards"
  }
}

run "network_keeps_nodes_private_and_storage_off_the_nat_gateway" {
  assert {
    condition     = aws_vpc_endpoint.s3.vpc_endpoint_type == "Gateway" && aws_vpc_endpoint.s3.service_name == "com.amazonaws.us-east-1.s3" && contains(aws_vpc_endpoint.s3.route_table_ids, aws_route_table_association.gpu.route_table_id)
    error_message = "the GPU subnet reaches S3 by the gateway endpoint"
  }
  assert {
    condition     = aws_subnet.gpu.cidr_block == "10.64.0.0/17" && [for zone, subnet in aws_subnet.private : subnet.cidr_block] == ["10.64.128.0/20", "10.64.144.0/20"] && aws_subnet.public.cidr_block == "10.64.192.0/20"
    error_message = "half of the addresses are the GPU nodes', and nothing overlaps"
  }
  assert {
    condition     = one(aws_eks_cluster.this.vpc_config).endpoint_private_access && !one(aws_eks_cluster.this.vpc_config).endpoint_public_access
    error_message = "the API is private unless somebody is let in"
  }
  assert {
    condition     = aws_eks_cluster.this.access_config[0].authentication_mode == "API"
    error_message = "who may use the cluster is said here alone"
  }
}

run "images_are_immutable_and_scanned" {
  assert {
    condition     = toset([for each in aws_ecr_repository.this : each.name]) == toset(["line/services", "line/agent"]) && alltrue([for each in aws_ecr_repository.this : each.image_tag_mutability == "IMMUTABLE" && one(each.image_scanning_configuration).scan_on_push && !each.force_delete])
    error_message = "a tag means one image, and each is scanned"
  }
}

run "a_key_of_ones_own_encrypts_everything_and_may_be_used" {
  variables {
    kms_key_arn = "arn:aws:kms:us-east-1:123456789012:key/1234abcd"
  }
  assert {
    condition     = alltrue([for each in aws_s3_bucket_server_side_encryption_configuration.this : one(each.rule).bucket_key_enabled && one(one(each.rule).apply_server_side_encryption_by_default).kms_master_key_id == "arn:aws:kms:us-east-1:123456789012:key/1234abcd"])
    error_message = "buckets use the key"
  }
  assert {
    condition = {
      for name, policy in merge(aws_iam_role_policy.service, aws_iam_role_policy.ranks) : name => one([for statement in jsondecode(policy.policy).Statement : statement.Action if statement.Sid == "Key"])
      } == {
      data       = ["kms:Decrypt", "kms:GenerateDataKey"]
      train      = ["kms:Decrypt", "kms:GenerateDataKey"]
      checkpoint = ["kms:Decrypt", "kms:GenerateDataKey"]
      llm        = ["kms:Decrypt", "kms:GenerateDataKey"]
      monitor    = ["kms:Decrypt"]
    }
    error_message = "who writes may make data keys, who reads may decrypt"
  }
  assert {
    condition     = one(aws_eks_cluster.this.encryption_config).resources == toset(["secrets"])
    error_message = "Kubernetes secrets too"
  }
}
