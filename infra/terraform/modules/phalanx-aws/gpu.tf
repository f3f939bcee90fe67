# The ranks' nodes: one placement group in one zone, and an EFA interface on every network card.

locals {
  num_network_cards = data.aws_ec2_instance_type.gpu.maximum_network_cards
  is_block          = try(var.capacity_reservation.block, false)
}

resource "aws_placement_group" "gpu" {
  name     = "${var.name}-gpu"
  strategy = "cluster"
  tags     = local.tags
}

# EFA's own traffic passes security groups only between members of one group, in both directions.
resource "aws_security_group" "efa" {
  name        = "${var.name}-efa"
  description = "RDMA between GPU nodes"
  vpc_id      = aws_vpc.this.id
  tags        = merge(local.tags, { Name = "${var.name}-efa" })
}

resource "aws_vpc_security_group_ingress_rule" "efa" {
  security_group_id            = aws_security_group.efa.id
  description                  = "Everything from GPU nodes"
  referenced_security_group_id = aws_security_group.efa.id
  ip_protocol                  = "-1"
}

resource "aws_vpc_security_group_egress_rule" "efa" {
  security_group_id            = aws_security_group.efa.id
  description                  = "Everything to GPU nodes"
  referenced_security_group_id = aws_security_group.efa.id
  ip_protocol                  = "-1"
}

resource "aws_launch_template" "gpu" {
  name_prefix            = "${var.name}-gpu-"
  update_default_version = true
  instance_type          = var.gpu_nodes.instance_type
  tags                   = local.tags

  # The node's own disks become one volume for images, the cache of shards and temporary files.
  user_data = base64encode(<<-EOT
    MIME-Version: 1.0
    Content-Type: multipart/mixed; boundary="PHALANX"

    --PHALANX
    Content-Type: application/node.eks.aws

    apiVersion: node.eks.aws/v1alpha1
    kind: NodeConfig
    spec:
      instance:
        localStorage:
          strategy: RAID0

    --PHALANX--
  EOT
  )

  # The first card carries IP traffic too; the others carry RDMA alone and take no address.
  dynamic "network_interfaces" {
    for_each = range(local.num_network_cards)

    content {
      network_card_index          = network_interfaces.value
      device_index                = network_interfaces.value == 0 ? 0 : 1
      interface_type              = network_interfaces.value == 0 ? "efa" : "efa-only"
      associate_public_ip_address = false
      delete_on_termination       = true
      security_groups             = [aws_security_group.efa.id, aws_eks_cluster.this.vpc_config[0].cluster_security_group_id]
    }
  }

  placement {
    group_name = aws_placement_group.gpu.name
  }

  dynamic "capacity_reservation_specification" {
    for_each = var.capacity_reservation == null ? [] : [var.capacity_reservation.id]

    content {
      capacity_reservation_target {
        capacity_reservation_id = capacity_reservation_specification.value
      }
    }
  }

  dynamic "instance_market_options" {
    for_each = local.is_block ? ["capacity-block"] : []

    content {
      market_type = instance_market_options.value
    }
  }

  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
  }

  block_device_mappings {
    device_name = "/dev/xvda"

    ebs {
      volume_type           = "gp3"
      volume_size           = var.gpu_nodes.root_volume_gib
      encrypted             = true
      delete_on_termination = true
    }
  }

  tag_specifications {
    resource_type = "instance"
    tags          = merge(local.tags, { Name = "${var.name}-gpu" })
  }

  lifecycle {
    precondition {
      condition     = data.aws_ec2_instance_type.gpu.efa_supported
      error_message = "gpu_nodes: ${var.gpu_nodes.instance_type} has no EFA; choose an instance type that has, for example p5.48xlarge."
    }
    precondition {
      condition     = contains(data.aws_ec2_instance_type.gpu.supported_placement_strategies, "cluster")
      error_message = "gpu_nodes: ${var.gpu_nodes.instance_type} cannot be in a cluster placement group; choose another instance type."
    }
    precondition {
      condition     = length(data.aws_ec2_instance_type.gpu.gpus) > 0
      error_message = "gpu_nodes: ${var.gpu_nodes.instance_type} has no GPU; choose an instance type that has, for example p5.48xlarge."
    }
  }
}

resource "aws_eks_node_group" "gpu" {
  cluster_name    = aws_eks_cluster.this.name
  node_group_name = "gpu"
  node_role_arn   = aws_iam_role.node.arn
  subnet_ids      = [aws_subnet.gpu.id]
  ami_type        = "AL2023_x86_64_NVIDIA"
  capacity_type   = local.is_block ? "CAPACITY_BLOCK" : "ON_DEMAND"
  version         = var.kubernetes_version
  labels          = { "phalanx/nodes" = "gpu", "vpc.amazonaws.com/efa.present" = "true", "nvidia.com/gpu.present" = "true" }
  tags            = local.tags

  launch_template {
    id      = aws_launch_template.gpu.id
    version = aws_launch_template.gpu.latest_version
  }

  # Only what asks for a GPU comes here.
  taint {
    key    = "nvidia.com/gpu"
    value  = "present"
    effect = "NO_SCHEDULE"
  }

  scaling_config {
    min_size     = var.gpu_nodes.min_size
    max_size     = var.gpu_nodes.max_size
    desired_size = var.gpu_nodes.desired_size
  }

  update_config {
    max_unavailable = 1
  }

  depends_on = [aws_iam_role_policy_attachment.node, aws_eks_addon.network]
}
