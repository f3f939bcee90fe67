variable "name" {
  description = "Name of the cluster and prefix of everything that belongs to it."
  type        = string

  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,22}[a-z0-9]$", var.name))
    error_message = "name: 3 to 24 lower-case letters, digits and hyphens, first a letter, last no hyphen (it becomes part of bucket names)."
  }
}

variable "tags" {
  description = "Tags of everything."
  type        = map(string)
  default     = {}
}

# Network

variable "vpc_cidr" {
  description = "Addresses of the VPC. Half of them go to the GPU nodes."
  type        = string
  default     = "10.64.0.0/16"

  validation {
    condition     = can(cidrnetmask(var.vpc_cidr)) && try(tonumber(split("/", var.vpc_cidr)[1]), 0) >= 16 && try(tonumber(split("/", var.vpc_cidr)[1]), 99) <= 20
    error_message = "vpc_cidr: an IPv4 block from /16 to /20, for example 10.64.0.0/16."
  }
}

variable "availability_zones" {
  description = "Zones of the system nodes and of the control plane, which needs at least two."
  type        = list(string)

  validation {
    condition     = length(distinct(var.availability_zones)) == length(var.availability_zones) && length(var.availability_zones) >= 2 && length(var.availability_zones) <= 4
    error_message = "availability_zones: two to four different zones, for example [\"us-east-1a\", \"us-east-1b\"]."
  }
}

variable "gpu_availability_zone" {
  description = "The one zone of the GPU nodes: where the capacity is. A placement group does not span zones."
  type        = string

  validation {
    condition     = contains(var.availability_zones, var.gpu_availability_zone)
    error_message = "gpu_availability_zone: one of availability_zones."
  }
}

# Kubernetes

variable "kubernetes_version" {
  description = "Version of the control plane and of the nodes."
  type        = string
  default     = "1.33"

  validation {
    condition     = can(regex("^1\\.(2[89]|[3-9][0-9])$", var.kubernetes_version))
    error_message = "kubernetes_version: 1.28 or newer, minor version only, for example \"1.33\"."
  }
}

variable "api_access_cidrs" {
  description = "Who reaches the Kubernetes API from outside the VPC; empty: nobody."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for cidr in var.api_access_cidrs : can(cidrnetmask(cidr)) && !endswith(cidr, "/0")])
    error_message = "api_access_cidrs: IPv4 blocks of your own, for example [\"203.0.113.7/32\"]; never the whole internet."
  }
}

variable "cluster_admins" {
  description = "ARNs of IAM roles or users that administer the cluster. Whoever applies is one already."
  type        = list(string)
  default     = []

  validation {
    condition     = alltrue([for arn in var.cluster_admins : can(regex("^arn:aws[a-z-]*:iam::[0-9]{12}:(role|user)/.+$", arn))])
    error_message = "cluster_admins: ARNs of IAM roles or users, for example arn:aws:iam::123456789012:role/admin."
  }
}

variable "service_namespace" {
  description = "Kubernetes namespace of the services; their service accounts are called data, train, checkpoint and monitor."
  type        = string
  default     = "phalanx"

  validation {
    condition     = can(regex("^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", var.service_namespace))
    error_message = "service_namespace: a Kubernetes name: lower-case letters, digits and hyphens."
  }
}

variable "rank_scopes" {
  description = <<-EOT
    Who may train what, by a name of your choice. Each scope becomes a role for one Kubernetes service account, which reads
    all data and creates objects below projects/<project>/jobs/<job>/ alone. job: one job's name, or a pattern such as "llm-*".
  EOT
  type = map(object({
    namespace       = string
    service_account = string
    project         = string
    job             = optional(string, "*")
  }))
  default = {}

  validation {
    condition     = alltrue([for name, scope in var.rank_scopes : can(regex("^[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?$", scope.project))])
    error_message = "rank_scopes: project is the name of one project as in the job file, without a pattern."
  }
  validation {
    condition     = alltrue([for name, scope in var.rank_scopes : can(regex("^[a-z0-9*?][a-z0-9._*?-]{0,62}$", scope.job))])
    error_message = "rank_scopes: job is a job's name as in the job file, or one with * and ? in it."
  }
  validation {
    condition     = alltrue([for name, scope in var.rank_scopes : can(regex("^[a-z0-9-]{1,24}$", name))])
    error_message = "rank_scopes: their names have 1 to 24 lower-case letters, digits and hyphens."
  }
  validation {
    condition = alltrue([
      for name, scope in var.rank_scopes : can(regex("^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", scope.namespace)) && can(regex("^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$", scope.service_account))
    ])
    error_message = "rank_scopes: namespace and service_account are Kubernetes names, without a pattern."
  }
}

# Nodes

variable "system_nodes" {
  description = "Nodes of the services."
  type = object({
    instance_type = optional(string, "m7i.xlarge")
    min_size      = optional(number, 2)
    max_size      = optional(number, 4)
    desired_size  = optional(number, 2)
  })
  default = {}

  validation {
    condition     = 1 <= var.system_nodes.min_size && var.system_nodes.min_size <= var.system_nodes.desired_size && var.system_nodes.desired_size <= var.system_nodes.max_size
    error_message = "system_nodes: 1 <= min_size <= desired_size <= max_size."
  }
}

variable "gpu_nodes" {
  description = <<-EOT
    Nodes of the ranks. They cost by the second whether they train or not: desired_size is 0 until you say otherwise.
    root_volume_gib: for images; checkpoints and the cache of shards use the instance's own disks.
  EOT
  type = object({
    instance_type   = optional(string, "p5.48xlarge")
    min_size        = optional(number, 0)
    max_size        = optional(number, 2)
    desired_size    = optional(number, 0)
    root_volume_gib = optional(number, 200)
  })
  default = {}

  validation {
    condition     = 0 <= var.gpu_nodes.min_size && var.gpu_nodes.min_size <= var.gpu_nodes.desired_size && var.gpu_nodes.desired_size <= var.gpu_nodes.max_size && var.gpu_nodes.max_size >= 1
    error_message = "gpu_nodes: 0 <= min_size <= desired_size <= max_size, and max_size at least 1."
  }
  validation {
    condition     = var.gpu_nodes.root_volume_gib >= 100
    error_message = "gpu_nodes: root_volume_gib is at least 100: an image with CUDA and torch takes 20 and is kept beside its successor."
  }
}

variable "capacity_reservation" {
  description = "A capacity reservation for the GPU nodes, in their zone. block: it is a Capacity Block, bought for a span of time."
  type = object({
    id    = string
    block = optional(bool, false)
  })
  default = null

  validation {
    condition     = var.capacity_reservation == null || can(regex("^cr-[0-9a-f]{8,17}$", var.capacity_reservation.id))
    error_message = "capacity_reservation: id looks like cr-0123456789abcdef0."
  }
}

# Storage

variable "noncurrent_days" {
  description = "How long a deleted object can be brought back. Checkpoints that retention removed are paid for so long."
  type        = number
  default     = 7

  validation {
    condition     = var.noncurrent_days >= 1 && var.noncurrent_days <= 365 && floor(var.noncurrent_days) == var.noncurrent_days
    error_message = "noncurrent_days: a whole number of days from 1 to 365."
  }
}

variable "abort_multipart_days" {
  description = "After how many days an unfinished upload in parts is dropped; a rank that was killed leaves them."
  type        = number
  default     = 2

  validation {
    condition     = var.abort_multipart_days >= 1 && var.abort_multipart_days <= 30 && floor(var.abort_multipart_days) == var.abort_multipart_days
    error_message = "abort_multipart_days: a whole number of days from 1 to 30."
  }
}

variable "kms_key_arn" {
  description = "Key for buckets, images and Kubernetes secrets; null: keys that AWS owns. Its policy must let this account's IAM grant its use."
  type        = string
  default     = null

  validation {
    condition     = var.kms_key_arn == null || can(regex("^arn:aws[a-z-]*:kms:[a-z0-9-]+:[0-9]{12}:key/.+$", var.kms_key_arn))
    error_message = "kms_key_arn: the ARN of a key (not of an alias), for example arn:aws:kms:us-east-1:123456789012:key/1234abcd-...."
  }
}

variable "allow_destroying_data" {
  description = "Whether `terraform destroy` may remove buckets and image repositories that are not empty, with all checkpoints."
  type        = bool
  default     = false
}
