# Input that cannot work is refused before anything is made, by the variable that is wrong.

mock_provider "aws" {
  source = "./tests/mocks"
}

variables {
  name                  = "line"
  availability_zones    = ["us-east-1a", "us-east-1b"]
  gpu_availability_zone = "us-east-1b"
}

run "a_name_that_no_bucket_can_have_is_refused" {
  command = plan
  variables {
    name = "Line_1"
  }
  expect_failures = [var.name]
}

run "a_network_that_is_too_small_is_refused" {
  command = plan
  variables {
    vpc_cidr = "10.0.0.0/24"
  }
  expect_failures = [var.vpc_cidr]
}

run "a_network_that_is_no_network_is_refused" {
  command = plan
  variables {
    vpc_cidr = "ten dot"
  }
  expect_failures = [var.vpc_cidr]
}

run "a_single_zone_is_refused" {
  command = plan
  variables {
    availability_zones = ["us-east-1b"]
  }
  expect_failures = [var.availability_zones]
}

run "gpu_nodes_outside_the_zones_are_refused" {
  command = plan
  variables {
    gpu_availability_zone = "us-east-1f"
  }
  expect_failures = [var.gpu_availability_zone]
}

run "an_api_open_to_everybody_is_refused" {
  command = plan
  variables {
    api_access_cidrs = ["0.0.0.0/0"]
  }
  expect_failures = [var.api_access_cidrs]
}

run "an_administrator_that_is_no_arn_is_refused" {
  command = plan
  variables {
    cluster_admins = ["admin"]
  }
  expect_failures = [var.cluster_admins]
}

run "a_patch_version_of_kubernetes_is_refused" {
  command = plan
  variables {
    kubernetes_version = "1.33.1"
  }
  expect_failures = [var.kubernetes_version]
}

run "a_scope_over_every_project_is_refused" {
  command = plan
  variables {
    rank_scopes = { all = { namespace = "training", service_account = "ranks", project = "*" } }
  }
  expect_failures = [var.rank_scopes]
}

run "a_scope_for_every_service_account_is_refused" {
  command = plan
  variables {
    rank_scopes = { all = { namespace = "training", service_account = "*", project = "llm" } }
  }
  expect_failures = [var.rank_scopes]
}

run "a_job_that_leaves_its_folder_is_refused" {
  command = plan
  variables {
    rank_scopes = { all = { namespace = "training", service_account = "ranks", project = "llm", job = "a/../../b" } }
  }
  expect_failures = [var.rank_scopes]
}

run "more_nodes_than_the_maximum_are_refused" {
  command = plan
  variables {
    gpu_nodes = { desired_size = 3, max_size = 2 }
  }
  expect_failures = [var.gpu_nodes]
}

run "a_reservation_that_is_none_is_refused" {
  command = plan
  variables {
    capacity_reservation = { id = "my reservation" }
  }
  expect_failures = [var.capacity_reservation]
}

run "a_lifecycle_of_no_days_is_refused" {
  command = plan
  variables {
    noncurrent_days      = 0
    abort_multipart_days = 1.5
  }
  expect_failures = [var.noncurrent_days, var.abort_multipart_days]
}

run "a_key_by_alias_is_refused" {
  command = plan
  variables {
    kms_key_arn = "alias/phalanx"
  }
  expect_failures = [var.kms_key_arn]
}

run "an_instance_without_efa_or_gpu_is_refused" {
  command = plan
  variables {
    gpu_nodes = { instance_type = "m7i.large" }
  }
  override_data {
    target = data.aws_ec2_instance_type.gpu
    values = { efa_supported = false, maximum_network_cards = 1, supported_placement_strategies = ["spread"], gpus = [] }
  }
  expect_failures = [aws_launch_template.gpu]
}
