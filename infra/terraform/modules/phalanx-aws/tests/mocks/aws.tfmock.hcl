# What AWS would say of an account, of a p5.48xlarge and of what was just made.

mock_data "aws_caller_identity" {
  defaults = { account_id = "123456789012" }
}

mock_data "aws_partition" {
  defaults = { partition = "aws" }
}

mock_data "aws_region" {
  defaults = { name = "us-east-1" }
}

mock_data "aws_ec2_instance_type" {
  defaults = {
    efa_supported                  = true
    maximum_network_cards          = 32
    supported_placement_strategies = ["cluster", "partition", "spread"]
    gpus                           = [{ count = 8, manufacturer = "NVIDIA", memory_size = 81920, name = "H100" }]
  }
}

mock_resource "aws_eks_cluster" {
  defaults = {
    identity = [{ oidc = [{ issuer = "https://oidc.eks.us-east-1.amazonaws.com/id/ABCDEF" }] }]
  }
}

mock_resource "aws_iam_role" {
  defaults = { arn = "arn:aws:iam::123456789012:role/mocked" }
}

mock_resource "aws_iam_openid_connect_provider" {
  defaults = { arn = "arn:aws:iam::123456789012:oidc-provider/oidc.eks.us-east-1.amazonaws.com/id/ABCDEF" }
}

mock_resource "aws_launch_template" {
  defaults = { id = "lt-0123456789abcdef0", latest_version = 1 }
}
